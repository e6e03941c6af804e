r"""Translation of regular expressions of ECMA-262 (JSON Schema's dialect) and Python to the grammar library's dialect.

The library supports nested sets and set differences: `[[a-z]*[-]?[a-z]*]*` is one set and a `*` in it, but a set, a `-`
and another set in both dialects. It rejects braces that are not a quantifier, and `\0`. Its `.` excludes only `\n`,
ECMA's also excludes `\r`. (And U+2028 and U+2029, which are allowed here, because masks of `.{1,200}` would take
fourteen times as long without them.) All functions take time linear in the pattern.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

SPECIAL = "[]&~-^"
"""Characters that may mean more than themselves within brackets."""
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}"
    r"|[ux]\{[0-9a-fA-F]{1,8}\}|[pP]\{[^{}]{0,64}\}|c[a-zA-Z]|0[0-7]{0,2}|[1-3][0-7]{2}|.)",
    re.DOTALL,
)
PAIR = 12
"""Length of an escaped pair of surrogates, in characters."""
SETS = "dDwWsSpP"
"""Letters after a backslash that mean several characters, so they cannot be the ends of a range."""
ASCII_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
ECMA_DOT = r"[^\n\r]"
FLAGS = re.compile(r"\(\?([aiLmsux]+)(-[imsx]+)?([:)])")
QUANTIFIER = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
OPEN_QUANTIFIER = re.compile(r"\{,([0-9]*)\}")
"""In Python, a missing first number means 0. In ECMA-262 such braces are text, and the library rejects them."""
LITERALS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7}
CONTROLS = frozenset((*range(0x20), 0x7F)) - {8, 9, 10, 12, 13}
r"""Characters that JSON strings can only spell as `\u00XX`, not as a letter after a backslash."""
QUOTED = frozenset(b'"\\')
BLANKS = frozenset(b"\t\n\v\f\r")
ESCAPED_OR_CONTROL = QUOTED | frozenset(range(0x20))


def portable(pattern: str, *, python: bool = False) -> str:
    r"""Translate a pattern of ECMA-262, or of Python with `re.ASCII`, to the library's dialect.

    Unclosed brackets and comments stay unchanged. Raises ValueError for Python's possessive quantifiers.
    """
    flags = "".join(found[1] for found in FLAGS.finditer(pattern))
    reader, dot = _Reader(python, "x" in flags), "." if python or "s" in flags else ECMA_DOT
    written: list[str] = []
    at, is_repeated = 0, False
    while at < len(pattern):
        was_repeated, is_repeated = is_repeated, False
        here = pattern[at]
        if found := ESCAPE.match(pattern, at):
            written.append(reader.escape(found[0]))
            at = found.end()
        elif here == "[":
            end = _end_of_class(pattern, at)
            if not end:
                return pattern
            written.append(reader.set(pattern[at:end]))
            at = end
        elif here == "{" and (found := QUANTIFIER.match(pattern, at)):
            written.append(found[0])
            at, is_repeated = found.end(), True
        elif here == "{" and (found := OPEN_QUANTIFIER.match(pattern, at)):
            written.append(f"{{0,{found[1]}}}" if python else found[0])
            at, is_repeated = found.end(), True
        elif python and pattern.startswith("(?#", at):
            at, is_repeated = pattern.find(")", at) + 1, was_repeated
            if not at:
                return pattern
        elif python and here == "(" and (found := FLAGS.match(pattern, at)):
            written.append(_group(found))
            at = found.end()
        elif python and was_repeated and here == "+":
            raise ValueError("possessive quantifiers cannot be enforced")
        else:
            is_repeated = here in "*+?" and not was_repeated
            written.append({"{": r"\{", ".": dot}.get(here, here))
            at += 1
    return "".join(written)


def demands_controls(pattern: str) -> bool:
    """Whether a portable pattern contains one of `CONTROLS`, except in a set with other characters."""
    at = 0
    while at < len(pattern):
        if found := ESCAPE.match(pattern, at):
            here, at = found[0], found.end()
        elif pattern[at] == "[":
            end = _end_of_class(pattern, at)
            if not end:
                return False
            if _is_of_controls(pattern[at:end]):
                return True
            at = end
            continue
        else:
            here, at = pattern[at], at + 1
        if _code_point(here) in CONTROLS:
            return True
    return False


def without_quotes_for_controls(pattern: str) -> str:
    r"""Remove U+0000 from sets like `[^"]` of a portable pattern: all control characters, without `"` or `\\`.

    For a set of all control characters, or of all except `\n`, the library allows any letter after a backslash, and so
    also `\"` and `\\\\`.
    """
    written: list[str] = []
    at = 0
    while at < len(pattern):
        end = at + 1
        if found := ESCAPE.match(pattern, at):
            end = found.end()
        elif pattern[at] == "[":
            end = _end_of_class(pattern, at)
            if not end:
                return pattern
            written.append(_without_null(pattern[at:end]))
            at = end
            continue
        written.append(pattern[at:end])
        at = end
    return "".join(written)


def _without_null(text: str) -> str:
    is_negated, ranges = _ranges(text)
    points = [(_code_point(low), _code_point(high)) for low, high in ranges if not _is_set(low)]
    named = {each for each in ESCAPED_OR_CONTROL if any(low <= each <= high for low, high in points)}
    named |= BLANKS if any(low == r"\s" for low, _ in ranges) else frozenset()
    if is_negated:
        return f"[^\\x00{text[2:]}" if named & QUOTED and named <= QUOTED | {10} else text
    if named >= QUOTED or not named >= ESCAPED_OR_CONTROL - QUOTED - {10}:
        return text
    left = [(r"\x01" if _code_point(low) == 0 else low, high) for low, high in ranges if _code_point(high) != 0]
    return "[" + "".join(low if low == high else f"{low}-{high}" for low, high in left) + "]"


def _group(found: re.Match[str]) -> str:
    """Return a group's opening without the flags that select Python's meaning of `\\w` and similar escapes."""
    flags = "".join(flag for flag in found[1] if flag not in "aLu") + (found[2] or "")
    if found[3] == ")":
        return f"(?{flags})" if flags else ""
    return f"(?{flags}:"


def _end_of_class(pattern: str, begin: int) -> int:
    """Return the position after the closing bracket of a class, or 0. A bracket at its beginning is a member."""
    at = begin + 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern):
        if found := ESCAPE.match(pattern, at):
            at = found.end()
        elif pattern[at] == "]":
            return at + 1
        else:
            at += 1
    return 0


class _Reader:
    """Translates escapes and sets of a dialect."""

    def __init__(self, python: bool, verbose: bool) -> None:
        self._python = python
        self._special = SPECIAL + " #\t\n\r\f\v" if verbose else SPECIAL

    def escape(self, text: str) -> str:
        """Translate an escape outside of brackets."""
        if self._python and (chosen := ASCII_SETS.get(text[1:].lower())):
            return f"[{'^' if text[1].isupper() else ''}{chosen}]"
        if self._python and text == r"\Z":
            return r"\z"
        return self._character(text)

    def set(self, text: str) -> str:
        """Translate a set in brackets: single characters, ranges, and escapes of several characters."""
        is_negated, ranges = _ranges(text)
        written = [
            self._member(low) if low == high else f"{self._member(low)}-{self._member(high)}" for low, high in ranges
        ]
        return f"[{'^' if is_negated else ''}{''.join(written)}]"

    def _member(self, member: str) -> str:
        if self._python and (chosen := ASCII_SETS.get(member[1:].lower())):
            return f"[^{chosen}]" if member[1].isupper() else chosen
        if member == r"\b":  # a backspace within brackets
            return r"\x08"
        if len(member) == 1 and member in self._special:
            return f"\\x{ord(member):02x}" if member.isspace() else "\\" + member
        return self._character(member)

    def _character(self, text: str) -> str:
        """Translate a single character, or an escape with the same meaning in brackets and outside."""
        if len(text) == 1 or text == "\\":
            return text
        letter = text[1]
        if (
            len(text) == PAIR
            or letter == "0"
            or (letter == "c" and len(text) == 3)
            or text[1:].isdigit()
            and len(text) == 4
        ):
            return f"\\x{{{_code_point(text):x}}}"
        return letter if letter in "<>" or not letter.isascii() else text


def _ranges(text: str) -> tuple[bool, list[tuple[str, str]]]:
    """Return whether a set is negated, and its ranges. A single character or escape is a range with equal ends."""
    is_negated = text.startswith("[^")
    members = list(_members(text[2 if is_negated else 1 : -1]))
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(members):
        ends = members[at : at + 3]
        if len(ends) == 3 and ends[1] == "-" and not any(_is_set(end) for end in (ends[0], ends[2])):
            found.append((ends[0], ends[2]))
            at += 3
        else:
            found.append((members[at], members[at]))
            at += 1
    return is_negated, found


def _members(inside: str) -> Iterator[str]:
    """Characters, and escapes of one."""
    at = 0
    while at < len(inside):
        found = ESCAPE.match(inside, at)
        yield found[0] if found else inside[at]
        at = found.end() if found else at + 1


def _is_set(member: str) -> bool:
    return len(member) > 1 and member[1] in SETS


def _is_of_controls(text: str) -> bool:
    """Whether a set consists of some of `CONTROLS`, or excludes everything else."""
    is_negated, ranges = _ranges(text)
    known = [(_code_point(low), _code_point(high)) for low, high in ranges if not _is_set(low)]
    if not is_negated:
        return any(0 <= high - low < 0x20 and low in CONTROLS and high in CONTROLS for low, high in known)
    left: list[tuple[int, int]] = []
    at = 0
    for low, high in [*sorted(known), (sys.maxunicode + 1, sys.maxunicode + 1)]:
        if at < low:
            left.append((at, low - 1))
        at = max(at, high + 1)
    return all(high < 0x20 or low == high == 0x7F for low, high in left)


def _code_point(text: str) -> int:
    """Return the code point of a character or its escape; -1 for an escape of several characters or of a position."""
    if len(text) == 1:
        return ord(text)
    letter, rest = text[1:2], text[2:]
    if len(text) == PAIR:
        return 0x10000 + ((int(text[2:6], 16) & 0x3FF) << 10) + (int(text[8:], 16) & 0x3FF)
    if letter in "uxU" and rest:
        return int(rest.strip("{}"), 16)
    if letter == "c" and rest:
        return ord(rest) % 32
    if text[1:].isdigit() and (letter == "0" or len(text) == 4):
        return int(text[1:], 8)
    if letter in LITERALS:
        return LITERALS[letter]
    return -1 if letter.isalnum() else ord(letter or "\\")
