"""Regular expressions without look-ahead for all texts but some, and the texts that a simple pattern names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ANY = r"[\s\S]"
MAX_CHARS = 4096
"""Of the texts that one expression leaves out: it is about five times as long."""
LITERAL = re.compile(r"(?:[\w \-/:@#%&=,;<>!~'\"]|\\[.\-/*+?()\[\]{}|^$\\])*")
"""Characters of a pattern that stand for themselves, some of them behind a backslash."""

_Tree = dict[str, "_Tree"]
_END = ""


def none_of(texts: Iterable[str]) -> str:
    """A pattern of every text that is none of these. Raises ValueError if they are too long."""
    return f"^{_other_than(_tree(texts))}$"


def none_begins(prefixes: Iterable[str]) -> str:
    """A pattern of every text that begins with none of these. Raises ValueError if they are too long."""
    return f"^{_beginning_otherwise(_tree(prefixes))}$"


def texts_of(pattern: object) -> tuple[list[str], bool] | None:
    """The texts that a pattern like `^(a|b)$` matches, or begin with for one like `^(a|b)`; None for any other.

    True comes with whole texts.
    """
    if not isinstance(pattern, str) or not pattern.startswith("^"):
        return None
    is_whole = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1:-1] if is_whole else pattern[1:]
    for opening in ("(?:", "("):
        if inner.startswith(opening) and inner.endswith(")"):
            inner = inner[len(opening) : -1]
            break
    else:
        if "|" in inner:  # where `^` and `$` belong to one alternative each
            return None
    found = inner.split("|")
    if not all(LITERAL.fullmatch(each) for each in found) or any(each.endswith("\\") for each in found):
        return None
    return [re.sub(r"\\(.)", r"\1", each) for each in found], is_whole


def beginning_of(pattern: object) -> str:
    """The text with which all matches begin: "ab" for `^abc?`; "" where none is known."""
    if not isinstance(pattern, str) or not pattern.startswith("^") or "|" in pattern:
        return ""
    found = LITERAL.match(pattern, 1)
    literal = found[0] if found else ""
    if pattern[1 + len(literal) : 2 + len(literal)] in ("?", "*", "{"):  # which make the last character optional
        literal = literal[: -2 if literal[-2:-1] == "\\" else -1]
    return re.sub(r"\\(.)", r"\1", literal)


def _tree(texts: Iterable[str]) -> _Tree:
    """The texts as a tree of characters; `_END` is where one ends."""
    root: _Tree = {}
    left = MAX_CHARS
    for text in texts:
        left -= len(text) + 1
        if left < 0:
            raise ValueError(f"the texts to leave out have more than {MAX_CHARS:,} characters")
        here = root
        for character in text:
            here = here.setdefault(character, {})
        here[_END] = {}
    return root


def _other_than(tree: _Tree) -> str:
    """Of what may follow a place in the tree so that the whole is none of its texts."""
    characters, tail = _followers(tree)
    branches = [_class(characters, negated=True) + f"{ANY}*"]
    for character in characters:
        branches.append(_class([character]) + tail[character])
    inside = "|".join(branches)
    return f"(?:{inside})" if _END in tree else f"(?:{inside})?"


def _followers(tree: _Tree) -> tuple[Sequence[str], dict[str, str]]:
    characters = sorted(character for character in tree if character != _END)
    return characters, {character: _other_than(tree[character]) for character in characters}


def _beginning_otherwise(tree: _Tree) -> str:
    if _END in tree:
        raise ValueError("every text begins with one of these")
    characters = sorted(tree)
    branches = [_class(characters, negated=True) + f"{ANY}*"]
    for character in characters:
        if _END not in tree[character]:
            branches.append(_class([character]) + _beginning_otherwise(tree[character]))
    return f"(?:{'|'.join(branches)})?"


def _class(characters: Sequence[str], *, negated: bool = False) -> str:
    if not characters:
        return ANY if negated else "[]"
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 else rf"\{c}" if c in r"\]^-[&~|" else c for c in characters)
    return f"[{'^' if negated else ''}{escaped}]"
