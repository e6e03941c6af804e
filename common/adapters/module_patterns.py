r"""Values by patterns of modules' names, as PEFT's `rank_pattern` and `alpha_pattern` have them.

PEFT takes the first pattern with `re.match(rf"(.*\.)?({pattern})$", name)`. The patterns come from a file of unknown
origin, and Python's `re` needs exponential time for some of them, with the interpreter locked. So patterns are parsed
by Python's parser and matched by sets of positions: a node of the pattern maps the set of positions of the name before
it to the set of positions after it. A set is an integer, bit `i` for the position before character `i`. A repetition
takes at most one round for each character of the name, and the nodes that one file may visit are bounded in number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Generic, TypeVar

V = TypeVar("V")
MAX_PATTERN, MAX_PATTERNS_CHARS = 256, 65_536
"""Characters of a pattern, and of all patterns of a field, except plain names."""
MAX_VISITS = 1_000_000
"""Nodes that are visited for all names of a file: a few seconds. Ordinary patterns visit ten to fifty for a name."""
PLAIN = re.compile(r"[\w.-]+", re.ASCII)
"""A name, in which a dot stands for any character."""
ASCII = frozenset(map(chr, range(128)))
CATEGORIES: Mapping[Any, str] = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
BEGINNINGS, ENDS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING), (op.AT_END, op.AT_END_STRING)


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    """One of these characters."""

    chars: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Edge:
    """The end of the name, or its beginning."""

    is_end: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Either:
    """One of several sequences. A group is one with a single sequence."""

    sequences: tuple[_Nodes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Repeated:
    least: int
    most: int
    nodes: _Nodes


_Nodes = tuple[_One | _Edge | _Either | _Repeated, ...]


class ModulePatterns(Generic[V]):
    """The values of one field, by patterns of names of ASCII characters.

    Raises ValueError, here and in `value`, for a pattern that is refused.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        num_chars = sum(len(pattern) for pattern in values if not PLAIN.fullmatch(pattern))
        if num_chars > MAX_PATTERNS_CHARS:
            raise ValueError(f"the patterns have {num_chars:,} characters; at most {MAX_PATTERNS_CHARS:,} are taken")
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

    def has_end(self, nodes: _Nodes) -> bool:
        """Whether they match the end of the name, from the beginning or after a dot."""
        starts = 1 | self._places.get(".", 0) << 1
        return bool(self._after(nodes, starts) >> self._last & 1)

    def _after(self, nodes: _Nodes, places: int) -> int:
        """The positions after `nodes`, which begin at one of `places`."""
        for node in nodes:
            if not places:
                return 0
            self.visits_left -= 1
            if self.visits_left < 0:
                raise ValueError("the patterns take too many steps")
            match node:
                case _One(chars):
                    places = (places & _union(at for char, at in self._places.items() if char in chars)) << 1
                case _Edge(is_end):
                    places &= 1 << self._last if is_end else 1
                case _Either(sequences):
                    places = _union([self._after(sequence, places) for sequence in sequences])
                case _Repeated():
                    places = self._after_rounds(node, places)
        return places

    def _after_rounds(self, repeated: _Repeated, places: int) -> int:
        """After as many rounds as the name has characters, one more changes nothing."""
        most = self._last + 1
        for _ in range(min(repeated.least, most)):
            if (ends := self._after(repeated.nodes, places)) == places:
                break
            places = ends
        new = places
        for _ in range(min(repeated.most - repeated.least, most)):
            new = self._after(repeated.nodes, new) & ~places
            if not new:
                break
            places |= new
        return places


def _parsed(pattern: str) -> _Nodes | None:
    """The pattern as Python parses it; None for a plain name."""
    if PLAIN.fullmatch(pattern):
        return None
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"{pattern!r} has {len(pattern):,} characters; at most {MAX_PATTERN} are taken")
    try:
        parsed = _parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            raise _Unsupported("flags")
        return _nodes(parsed)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    except _Unsupported as error:
        raise ValueError(f"{pattern!r} is not supported: {error}") from error


class _Unsupported(Exception):
    """What no set of positions can match, or what no pattern of modules needs."""


def _nodes(parsed: Iterable[tuple[Any, Any]]) -> _Nodes:
    return tuple(_node(kind, what) for kind, what in parsed)


def _node(kind: Any, what: Any) -> _One | _Edge | _Either | _Repeated:
    """Raises _Unsupported."""
    if kind is op.LITERAL:
        return _One(frozenset(chr(what)))
    if kind is op.NOT_LITERAL:
        return _One(ASCII - {chr(what)})
    if kind is op.ANY:
        return _One(ASCII - {"\n"})
    if kind is op.IN:
        negated = what[0][0] is op.NEGATE
        chars = frozenset[str]().union(*(_chars(*one) for one in what[negated:]))
        return _One(ASCII - chars if negated else chars)
    if kind is op.AT and what in BEGINNINGS + ENDS:
        return _Edge(what in ENDS)
    if kind is op.BRANCH:
        return _Either(tuple(_nodes(branch) for branch in what[1]))
    if kind is op.SUBPATTERN and not (what[1] or what[2]):
        return _Either((_nodes(what[3]),))
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, repeated = what
        return _Repeated(least, most, _nodes(repeated))
    raise _Unsupported("lookarounds, references, \\b, flags, atomic groups and possessive repetitions")


def _chars(kind: Any, what: Any) -> frozenset[str]:
    """The characters of a part of a set such as [a-z\\d]."""
    if kind is op.RANGE:
        return frozenset(char for char in ASCII if what[0] <= ord(char) <= what[1])
    return _of_category(CATEGORIES[what]) if kind is op.CATEGORY else frozenset(chr(what))


@cache
def _of_category(escape: str) -> frozenset[str]:
    return frozenset(char for char in ASCII if re.fullmatch(escape, char))


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
