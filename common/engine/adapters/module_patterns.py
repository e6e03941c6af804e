"""Lookup of values by module-name patterns: PEFT's `rank_pattern` and `alpha_pattern`.

PEFT takes the first pattern for which `re.match(rf"(.*\\.)?({pattern})$", name)` succeeds. The patterns come from
a file of unknown origin, and Python's `re` takes exponential time for some of them while it holds the interpreter.
llguidance matches with derivatives of regular expressions instead, in time linear in the name, within its own bounds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Generic, TypeVar

import llguidance

from common.grammar import brief, limits

V = TypeVar("V")
MAX_CHARS = 65_536
"""Maximum total length of the patterns of one field, in characters."""
PLAIN = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
"""A module name. Its dots match any character, as in PEFT."""


class ModulePatterns(Generic[V]):
    """The patterns of one field and their values. Not thread-safe.

    The constructor and `value` raise ValueError for an unsupported pattern.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        if (num_chars := sum(map(len, values))) > MAX_CHARS:
            raise ValueError(f"the patterns have {num_chars:,} characters; at most {MAX_CHARS:,} are supported")
        self._values = [(_matcher(pattern), pattern, value) for pattern, value in values.items()]

    def value(self, module: str, default: V) -> V:
        """Return the value of the first pattern that matches `module`, or a suffix of it that follows a dot."""
        for matcher, pattern, value in self._values:
            if _is_end(pattern, module) if matcher is None else _matches(matcher, pattern, module):
                return value
        return default


@cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _matcher(pattern: str) -> llguidance.LLMatcher | None:
    """Compile a pattern. Returns None for a plain name."""
    if PLAIN.fullmatch(pattern):
        return None
    anchored = pattern.startswith("^") and "|" not in pattern
    expression = f"({pattern[1:]})" if anchored else rf"(.*\.)?({pattern})"
    grammar = llguidance.LLMatcher.grammar_from_regex(expression)
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    _check(matcher, pattern)
    return matcher


def _matches(matcher: llguidance.LLMatcher, pattern: str, module: str) -> bool:
    name = list(module.encode())
    matcher.reset()
    matches = matcher.try_consume_tokens(name) == len(name) and matcher.is_accepting()
    _check(matcher, pattern)
    return matches


def _check(matcher: llguidance.LLMatcher, pattern: str) -> None:
    if matcher.is_error():
        raise ValueError(f"{pattern[:100]!r} is not supported: {brief(matcher.get_error())}")


def _is_end(plain: str, module: str) -> bool:
    """Whether a plain name matches `module` or a suffix that follows a dot. Its dots match any character."""
    end = module[-len(plain) :]
    if len(end) < len(plain) or (len(plain) < len(module) and module[-len(plain) - 1] != "."):
        return False
    return end == plain or all(ours in (theirs, ".") for ours, theirs in zip(plain, end, strict=True))
