r"""Schema patterns as lexemes, for grammars of text that is not JSON. A lexeme must match the whole text.

JSON Schema's patterns match anywhere in a text: `^a` becomes `a[\s\S]*`, and `b` becomes `[\s\S]*b[\s\S]*`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import llguidance

ANY = r"[\s\S]*"
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|[\s\S]", re.DOTALL)
LOOK = re.compile(r"\(\?<?[=!]")
BACK_REFERENCE = re.compile(r"\\(?:[1-9]|k$)")
PATTERNS_KEPT = 512
"""Maximum number of cached pairs of a pattern and a name. They recur with each call of a function."""


def lexeme(pattern: str) -> str:
    """Convert a portable pattern to a lexeme of its full matches."""
    return f"/{llguidance.regex_to_lark(pattern, 'dw')}/"


def has_looks(pattern: str) -> bool:
    """Whether a pattern has a look-around or a back-reference, which the library does not support."""
    return any(
        BACK_REFERENCE.match(found[0]) or (found[0] == "(" and LOOK.match(pattern, found.start()))
        for found in PIECE.finditer(pattern)
    )


def searched(pattern: str) -> str:
    """Return the lexeme of all texts that contain a match; "" for a pattern with look-arounds or inner anchors."""
    branches: list[list[str]] = [[]]
    depth = 0
    if has_looks(pattern):
        return ""
    for piece in PIECE.findall(pattern):
        if piece[0] == "[" and piece[-1] != "]":  # not closed: the library reports it
            return lexeme(pattern)
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(piece)
    if any(piece in ("^", "$") for pieces in branches for piece in _inside(pieces)):
        return ""
    return lexeme("|".join(f"(?:{_unanchored(pieces)})" for pieces in branches))


def names_lexeme(names: str, patterns: Iterable[str], without: Iterable[str], taken: Sequence[str]) -> str:
    """Return a lexeme of those `names` that match all `patterns`, match none of `without`, and are not `taken`."""
    wanted = [lexeme for pattern in patterns if (lexeme := searched(pattern))]
    denied = [f"~{lexeme}" for pattern in without if (lexeme := searched(pattern))]
    known = [f"~({' | '.join(json.dumps(name, ensure_ascii=False) for name in taken)})"] if taken else []
    return " & ".join((names, *wanted, *denied, *known))


def _inside(pieces: list[str]) -> list[str]:
    """Return the pieces without the anchors at both ends."""
    inside = pieces[pieces[:1] == ["^"] :]
    return inside[: len(inside) - (inside[-1:] == ["$"])]


def _unanchored(pieces: list[str]) -> str:
    before, after = "" if pieces[:1] == ["^"] else ANY, "" if pieces[-1:] == ["$"] else ANY
    return f"{before}(?:{''.join(_inside(pieces))}){after}"


@lru_cache(PATTERNS_KEPT)
def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches anywhere in a text. Takes linear time. False for an unsupported pattern."""
    written = searched(pattern)
    if not written:
        return False
    matcher = llguidance.LLMatcher(_bytes(), f"start: TEXT\nTEXT: {written}\n", log_level=0)
    if matcher.is_error():
        return False
    ids = list(text.encode(errors="surrogatepass"))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@lru_cache(1)
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
