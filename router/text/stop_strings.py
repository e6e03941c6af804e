"""Stop strings in streamed text, found in constant time per character (Aho and Corasick, 1975)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from common.errors import InvalidRequest

MAX_STOP_CHARS = 4096
"""Maximum total length of a request's stop strings. The automaton has one state per character."""
AUTOMATONS_KEPT = 32
"""Number of cached automatons. Clients usually repeat their stop strings."""


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string, of length `depth`. `match` is the longest stop string that ends here."""

    depth: int
    children: dict[str, _Node]
    fallback: _Node | None = None  # the longest proper suffix that is also a prefix; None at the root
    match: str = ""


class StopScanner:
    """Cuts a text at the first complete stop string. If several end at the same character, the longest one counts.

    Holds back only text that may begin a stop string. `include_stop` keeps the stop string in the text. Raises
    InvalidRequest if a stop string is empty or all of them have more than `MAX_STOP_CHARS` characters.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._root = _automaton(tuple(stops))
        self._include_stop = include_stop
        self._node = self._root
        self._held = ""
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that was found, or None."""
        return self._stop

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that can be shown, and whether a stop string ended it. After the end, the text is "".

        If `may_end` is False, stop strings that end within `text` are ignored. Those that only begin in it count.
        """
        if self._stop is not None:
            return "", True
        if self._node is self._root and self._root.children.keys().isdisjoint(text):
            return text, False
        known = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            self._node = _step(self._node, char)
            if self._node.match and may_end:
                return self._cut(known[:index], self._node.match)
            while not self._node.children and self._node.fallback is not None:  # an ignored stop string is text
                self._node = self._node.fallback
        safe = len(known) - self._node.depth
        self._held = known[safe:]
        return known[:safe], False

    def flush(self, *, cut: bool = False) -> str:
        """Return the held text, at the end of a text without a stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _cut(self, text: str, stop: str) -> tuple[str, bool]:
        self._stop, self._held, self._node = stop, "", self._root
        return (text if self._include_stop else text.removesuffix(stop)), True


def _step(node: _Node, char: str) -> _Node:
    while True:
        child = node.children.get(char)
        if child is not None:
            return child
        if node.fallback is None:
            return node
        node = node.fallback


@lru_cache(maxsize=AUTOMATONS_KEPT)
def _automaton(stops: tuple[str, ...]) -> _Node:
    """Build the trie of all stop strings, with fallback links. Requests share it, so it is never modified."""
    _check(stops)
    root = _Node(0, {})
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1, {}))
        node.match = stop
    level = list(root.children.values())
    for node in level:
        node.fallback = root
    while level:
        level = [_link(node, char, child) for node in level for char, child in node.children.items()]
    return root


def _link(parent: _Node, char: str, child: _Node) -> _Node:
    assert parent.fallback is not None  # breadth first: the parent has its link
    child.fallback = _step(parent.fallback, char)
    child.match = child.match or child.fallback.match
    return child


def _check(stops: tuple[str, ...]) -> None:
    if not all(stops):
        raise InvalidRequest("Empty stop string: remove it from stop.", param="stop")
    total = sum(map(len, stops))
    if total > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"The stop strings have {total:,} characters in total; the maximum is {MAX_STOP_CHARS:,}", param="stop"
        )
