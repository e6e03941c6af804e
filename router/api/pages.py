"""Web pages for users: HTML documents, assembled from the files in `router/static`, and the libraries that they load.

A line `@file`, in a comment of its language, is replaced by the text of that file. `@integrity` is replaced by the hash
of the script that its element loads. `@policy` is replaced by the page's Content-Security-Policy, which allows only its
own scripts and style sheet, and requests to this service.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent.parent / "static"
VENDOR = STATIC / "vendor"
CHAT, DASHBOARD, DOCS = "chat/page.html", "dashboard/page.html", "docs/page.html"
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # not supported in a <meta> element
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # browsers must revalidate, to get the page of a new version
}
LIBRARY_PATH = "/static/"
LIBRARY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "public, max-age=31536000, immutable",  # paths contain the version of the library
}
MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".woff2": "font/woff2"}
LIBRARIES = {
    file.relative_to(VENDOR).as_posix(): file for file in sorted(VENDOR.rglob("*.*")) if file.suffix in MEDIA_TYPES
}
"""Files served under LIBRARY_PATH, by their path there."""
PART = re.compile(r"^/\* @([a-z0-9_/.-]+\.(?:css|js)) \*/\n", re.MULTILINE)
LOADED = re.compile(rf'src="{LIBRARY_PATH}([^"]+)" integrity="@integrity"')
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {style}; connect-src 'self'; img-src data:; font-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
TRUSTED_TYPES = "; require-trusted-types-for 'script'; trusted-types 'none'"
"""For pages that show model output. Swagger UI needs innerHTML, and shows only the schema of this service."""


@cache
def page(name: str) -> str:
    """Return the assembled page. Raises OSError if one of its files cannot be read."""
    text = PART.sub(lambda found: _text(found[1]), _text(name))
    loaded = [_hash((VENDOR / path).read_bytes()) for path in LOADED.findall(text)]
    for digest in loaded:
        text = text.replace("@integrity", digest, 1)
    scripts = " ".join(f"'{one}'" for one in (_hash(_content(text, "script")), *loaded))
    policy = POLICY.format(scripts=scripts, style=f"'{_hash(_content(text, 'style'))}'")
    return text.replace("@policy", policy + ("" if name == DOCS else TRUSTED_TYPES), 1)


@cache
def library(path: str) -> bytes:
    """Return a file of `LIBRARIES`. Raises OSError if it cannot be read."""
    return LIBRARIES[path].read_bytes()


def _text(name: str) -> str:
    file = STATIC / name
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css" and file.is_relative_to(VENDOR):  # its URLs are relative to the file
        text = text.replace("url(fonts/", f"url({LIBRARY_PATH}{file.parent.relative_to(VENDOR)}/fonts/")
    return text


def _content(text: str, tag: str) -> bytes:
    """Return the content of the only `tag` element without attributes."""
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].encode()


def _hash(content: bytes) -> str:
    """Return the hash of a script or style sheet, as in CSP and `integrity`."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
