"""Web pages for users: self-contained HTML documents, assembled from the files in `router/static`.

A line `@file`, in a comment of its language, is replaced by the text of that file. `@policy` is replaced by the page's
Content-Security-Policy, which allows only its own script and style sheet, and requests to this service.
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
    "Content-Security-Policy": "frame-ancestors 'none'",  # not supported in a <meta> element
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # browsers must revalidate, to get the page of a new version
}
PART = re.compile(r"^/\* @([a-z0-9_/.-]+\.(?:css|js)) \*/\n", re.MULTILINE)
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@cache
def page(name: str) -> str:
    """Return the assembled page. Raises OSError if one of its files cannot be read."""
    text = PART.sub(lambda found: _text(found[1]), _text(name))
    return text.replace("@policy", POLICY.format(script=_hash(text, "script"), style=_hash(text, "style")), 1)


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str, tag: str) -> str:
    """Return the CSP hash of the content of the only `tag` element."""
    content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
