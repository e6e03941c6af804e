"""Suggestions for requests to unknown paths: wrong prefixes, paths of other servers, and misspellings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from router.request import COMPLETION_PATH

PREFIX = "/v1"
OTHER_SERVERS = {
    "/generate": COMPLETION_PATH,
    "/redoc": "/docs",
    "/swagger": "/docs",
}
MAX_PREFIX = 3
"""Maximum length, in segments, of a prefix to remove."""
MIN_SIMILARITY = 0.8
"""Minimum ratio of difflib for a path to count as misspelled."""


def suggested_path(path: str, paths: Iterable[str], exists: Callable[[str], bool]) -> str:
    """Return the path that a client probably meant by the unknown `path`; "" if none is similar.

    `paths` are the known paths without parameters. `exists` returns whether a path, including one with parameters, is
    served.
    """
    parts = [part for part in path.split("/") if part]
    for begin in range(min(len(parts), MAX_PREFIX + 1)):  # a prefix that is missing, repeated or of another server
        rest = "/" + "/".join(parts[begin:])
        for candidate in (PREFIX + rest, rest):
            if candidate != path and exists(candidate):
                return candidate
    cleaned = "/" + "/".join(parts)
    similar = get_close_matches(cleaned, paths, n=1, cutoff=MIN_SIMILARITY)
    return OTHER_SERVERS.get(cleaned) or (similar[0] if similar else "")
