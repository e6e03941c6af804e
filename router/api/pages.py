"""The pages for people: each is one HTML text that loads nothing, put together from the files in `router/static`.

A line `@file` of a page, in a comment of its language, stands for the text of that file. `@policy` stands for what a
browser lets the page do: run the one script and use the one style sheet in it, ask this service, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent.parent / "static"
CHAT, DASHBOARD = "chat/page.html", "dashboard/page.html"
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # no page may put it into a frame: only a header can say so
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a browser that has the page of an older version asks for the new one
}
PART = re.compile(r"^/\* @([a-z0-9_/.-]+\.(?:css|js)) \*/\n", re.MULTILINE)
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@cache
def page(name: str) -> str:
    """A page as it is served. Raises OSError when one of its files cannot be read."""
    text = PART.sub(lambda found: _text(found[1]), _text(name))
    return text.replace("@policy", POLICY.format(script=_hash(text, "script"), style=_hash(text, "style")), 1)


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str, tag: str) -> str:
    """What names the content of the only such element in a policy."""
    content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
