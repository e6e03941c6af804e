"""The pages for people: each is one HTML text that loads nothing, put together from the files in `router/static`.

A line `@file` of a page, in a comment of its language, stands for the text of that file.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent.parent / "static"
CHAT, DASHBOARD = "index.html", "dashboard.html"
PART = re.compile(r"^/\* @([a-z_]+\.(?:css|js)) \*/\n", re.MULTILINE)


@cache
def page(name: str) -> str:
    """A page as it is served. Raises OSError when one of its files cannot be read."""
    return PART.sub(lambda found: _text(found[1]), _text(name))


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
