r"""Values by patterns of modules' names, as PEFT's `rank_pattern` and `alpha_pattern` have them.

PEFT takes the first pattern with `re.match(rf"(.*\.)?({pattern})$", name)`. The patterns come from a file of unknown
origin, and Python's `re` needs exponential time for some of them, with the interpreter locked. So patterns are parsed
by Python's parser and matched by sets of positions: a node of the pattern maps the set of positions of the name before
it to the set of positions after it. A set is an integer, bit `i` for the position before character `i`. Every node
costs a few operations on integers, and a repetition takes at most one round for each character of the name. The number
of nodes that one file may visit is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Generic, TypeVar

V = TypeVar("V")
MAX_PATTERN = 256
"""Characters of a pattern."""
MAX_VISITS = 1_000_000
"""Nodes that are visited for all names of a file: at most four seconds. Ordinary patterns visit ten to fifty a name."""
PLAIN = re.compile(r"[\w.-]+", re.ASCII)
"""A name, in which a dot stands for any character."""
CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    op.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    op.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
BEGINNINGS, ENDS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING), (op.AT_END, op.AT_END_STRING)
Nodes = Iterable[tuple[Any, Any]]


class ModulePatterns(Generic[V]):
    """The values of one field. Raises ValueError, here and in `value`, for a pattern that is refused."""

    def __init__(self, values: Mapping[str, V]) -> None:
        self._values = [(pattern, _parsed(pattern), value) for pattern, value in values.items()]
        self._num_visits = 0

    def value(self, module: str, default: V) -> V:
        """The value of the first pattern that matches the end of a module's name, from the beginning or after a dot."""
        name: _Name | None = None
        for pattern, nodes, value in self._values:
            if nodes is None:
                if _is_end(pattern, module):
                    return value
                continue
            name = name or _Name(module, MAX_VISITS - self._num_visits)
            found = name.has_end(nodes)
            self._num_visits = MAX_VISITS - name.visits_left
            if found:
                return value
        return default


class _Name:
    """A module's name, and the sets of positions before its characters."""

    def __init__(self, text: str, visits_left: int) -> None:
        self.visits_left = visits_left
        self._last = len(text)
        self._places: dict[str, int] = {}
        for i, char in enumerate(text):
            self._places[char] = self._places.get(char, 0) | 1 << i

    def has_end(self, nodes: Nodes) -> bool:
        starts = 1 | self._places.get(".", 0) << 1
        return bool(self._after(nodes, starts) >> self._last & 1)

    def _after(self, nodes: Nodes, places: int) -> int:
        """The positions after `nodes`, which begin at one of `places`."""
        for kind, what in nodes:
            if not places:
                return 0
            self.visits_left -= 1
            if self.visits_left < 0:
                raise ValueError("the patterns take too many steps")
            if kind is op.SUBPATTERN:
                places = self._after(what[-1], places)
            elif kind is op.BRANCH:
                places = _union([self._after(branch, places) for branch in what[1]])
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
                least, most, repeated = what
                places = self._repeated(least, most, repeated, places)
            elif kind is op.AT:
                places &= 1 if what in BEGINNINGS else 1 << self._last
            else:
                places = (places & _union(at for char, at in self._places.items() if _takes(kind, what, char))) << 1
        return places

    def _repeated(self, least: int, most: int, nodes: Nodes, places: int) -> int:
        """After as many rounds as the name has characters, a round changes nothing more."""
        for _ in range(min(least, self._last + 1)):
            if (ends := self._after(nodes, places)) == places:
                break
            places = ends
        new = places
        for _ in range(min(most - least, self._last + 1)):
            new = self._after(nodes, new) & ~places
            if not new:
                break
            places |= new
        return places


def _parsed(pattern: str) -> Nodes | None:
    """The pattern as Python parses it; None for a plain name."""
    if PLAIN.fullmatch(pattern):
        return None
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"{pattern!r} has {len(pattern):,} characters; at most {MAX_PATTERN} are taken")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    for node in _nodes(parsed):
        if (reason := _refusal(*node)) or parsed.state.flags & ~re.UNICODE:
            raise ValueError(f"{pattern!r} is not supported: {reason or 'flags'}")
    return list(parsed)


def _nodes(parsed: Nodes) -> Iterator[tuple[Any, Any]]:
    """All nodes, except those of what is refused."""
    for kind, what in parsed:
        yield kind, what
        if kind is op.SUBPATTERN:
            yield from _nodes(what[-1])
        elif kind is op.BRANCH:
            for branch in what[1]:
                yield from _nodes(branch)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            yield from _nodes(what[2])


def _refusal(kind: Any, what: Any) -> str:
    if kind is op.AT:
        return "" if what in BEGINNINGS + ENDS else "\\b and \\B"
    if kind is op.SUBPATTERN:
        return "flags of a group" if what[1] or what[2] else ""
    known = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.BRANCH, op.MAX_REPEAT, op.MIN_REPEAT)
    return "" if kind in known else "lookarounds, references, atomic groups and possessive repetitions"


def _takes(kind: Any, what: Any, char: str) -> bool:
    """Whether a node of one character matches this one."""
    if kind is op.LITERAL:
        return chr(what) == char
    if kind is op.NOT_LITERAL:
        return chr(what) != char
    if kind is op.ANY:
        return char != "\n"
    negated: bool = what[0][0] is op.NEGATE
    return negated != any(_has(one, value, char) for one, value in what[negated:])


def _has(kind: Any, what: Any, char: str) -> bool:
    """Whether a part of a set such as [a-z\\d] has this character."""
    if kind is op.RANGE:
        return bool(what[0] <= ord(char) <= what[1])
    return CATEGORIES[what](char) if kind is op.CATEGORY else chr(what) == char


def _is_end(plain: str, module: str) -> bool:
    """Whether a plain name matches the end of a module's name. A dot of it stands for any character."""
    end = module[-len(plain) :]
    if len(end) < len(plain) or (len(plain) < len(module) and module[-len(plain) - 1] != "."):
        return False
    return end == plain or all(ours in (theirs, ".") for ours, theirs in zip(plain, end, strict=True))


def _union(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
