r"""Translation and analysis of regular expressions in schemas.

`portable` translates ECMA-262 (JSON Schema's dialect) and Python patterns to llguidance's dialect, which differs:

- It supports nested sets and set differences, so `[[a-z]*[-]?[a-z]*]*` is one set there, but in the other dialects a
  set, a `-` and another set.
- It rejects `\0`, and braces that are not a quantifier.
- Its `.` excludes only `\n`. ECMA-262 also excludes `\r`, and U+2028 and U+2029. The latter two are allowed here,
  because without them masks of `.{1,200}` take 14 times as long.

`searched` converts a pattern to a lexeme, for grammars of text that is not JSON. A lexeme must match the whole text,
but JSON Schema's patterns match anywhere in it: `^a` becomes `a[\s\S]*`, and `b` becomes `[\s\S]*b[\s\S]*`.

`none_of` builds a pattern, without look-ahead, of all texts except the given ones. `texts_of` enumerates the texts of a
simple pattern. All functions take time linear in the pattern's length.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import llguidance

SPECIAL = "[]&~-^"
"""Characters that can have a special meaning within brackets."""
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}"
    r"|[ux]\{[0-9a-fA-F]{1,8}\}|[pP]\{[^{}]{0,64}\}|c[a-zA-Z]|0[0-7]{0,2}|[1-3][0-7]{2}|.)",
    re.DOTALL,
)
PAIR = 12
"""Length of an escaped surrogate pair, in characters."""
SETS = "dDwWsSpP"
"""Letters of escapes that match several characters and cannot be the ends of a range."""
ASCII_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
ECMA_DOT = r"[^\n\r]"
FLAGS = re.compile(r"\(\?([aiLmsux]+)(-[imsx]+)?([:)])")
QUANTIFIER = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
OPEN_QUANTIFIER = re.compile(r"\{,([0-9]*)\}")
"""In Python, a missing first number means 0. In ECMA-262 these braces are literal, and llguidance rejects them."""
CONTROL_LETTERS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7}
CONTROLS = frozenset((*range(0x20), 0x7F)) - {8, 9, 10, 12, 13}
r"""Characters that JSON strings can only write as `\u00XX`, without a short escape."""
QUOTED = frozenset(b'"\\')
BLANKS = frozenset(b"\t\n\v\f\r")
ESCAPED_OR_CONTROL = QUOTED | frozenset(range(0x20))
ANY = r"[\s\S]*"
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|[\s\S]", re.DOTALL)
LOOK = re.compile(r"\(\?<?[=!]")
BACK_REFERENCE = re.compile(r"\\(?:[1-9]|k$)")
PATTERNS_KEPT = 512
"""Maximum number of cached (pattern, name) pairs. They recur in each call of a function."""
LEXERS_KEPT = 64
"""Maximum number of compiled patterns in the cache. Compiling one takes milliseconds; it may grow to 2 MiB."""
ANY_CHARACTER = r"[\s\S]"
MAX_CHARS = 4096
"""Maximum total length of excluded texts. The resulting pattern is about five times as long."""
PLAIN_TEXT = re.compile(r"(?:[\w \-/:@#%&=,;<>!~'\"]|\\[.\-/*+?()\[\]{}|^$\\])*")
"""Characters that match themselves, including escaped ones."""
_Tree = dict[str, "_Tree"]
_END = ""


def portable(pattern: str, *, python: bool = False) -> str:
    r"""Translate a pattern from ECMA-262, or from Python with `re.ASCII`, to llguidance's dialect.

    A pattern with an unclosed bracket or comment is returned unchanged. Raises ValueError for possessive quantifiers.
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
    r"""Exclude U+0000 from sets like `[^"]` that contain all control characters but not both of `"` and `\\`.

    For a set of all control characters, or of all except `\n`, llguidance allows any character after a backslash, so
    also `\"` and `\\\\`. The pattern must be portable.
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
    """Return the opening of a group without the flags that select Python's meaning of `\\w` and similar escapes."""
    flags = "".join(flag for flag in found[1] if flag not in "aLu") + (found[2] or "")
    if found[3] == ")":
        return f"(?{flags})" if flags else ""
    return f"(?{flags}:"


def _end_of_class(pattern: str, begin: int) -> int:
    """Return the position after the closing bracket of a class, or 0 without one. A leading bracket is a member."""
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
    """Translator for the escapes and sets of a dialect."""

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
        """Translate a set in brackets, with single characters, ranges, and escapes that match several characters."""
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
        """Translate a single character, or an escape that means the same inside and outside brackets."""
        if len(text) == 1 or text == "\\":
            return text
        letter = text[1]
        if (
            _is_pair(text)
            or letter == "0"
            or (letter == "c" and len(text) == 3)
            or text[1:].isdigit()
            and len(text) == 4
        ):
            return f"\\x{{{_code_point(text):x}}}"
        return letter if letter in "<>" or not letter.isascii() else text


def _ranges(text: str) -> tuple[bool, list[tuple[str, str]]]:
    """Return whether a set is negated, and its ranges. A single member is a range with equal ends."""
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
    """Yield the characters and escapes of a set."""
    at = 0
    while at < len(inside):
        found = ESCAPE.match(inside, at)
        yield found[0] if found else inside[at]
        at = found.end() if found else at + 1


def _is_set(member: str) -> bool:
    return len(member) > 1 and member[1] in SETS


def _is_of_controls(text: str) -> bool:
    """Whether a set consists only of `CONTROLS`, or excludes everything else."""
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


def _is_pair(text: str) -> bool:
    return len(text) == PAIR and text[6:8] == r"\u"


def _code_point(text: str) -> int:
    """Return the code point of a character or escape, or -1 for escapes of several characters or of a position."""
    if len(text) == 1:
        return ord(text)
    letter, rest = text[1:2], text[2:]
    if _is_pair(text):
        return 0x10000 + ((int(text[2:6], 16) & 0x3FF) << 10) + (int(text[8:], 16) & 0x3FF)
    if letter in "uxU" and rest:
        return int(rest.strip("{}"), 16)
    if letter == "c" and rest:
        return ord(rest) % 32
    if text[1:].isdigit() and (letter == "0" or len(text) == 4):
        return int(text[1:], 8)
    if letter in CONTROL_LETTERS:
        return CONTROL_LETTERS[letter]
    return -1 if letter.isalnum() else ord(letter or "\\")


def lexeme(pattern: str) -> str:
    """Convert a portable pattern to a lexeme that matches whole texts."""
    return f"/{llguidance.regex_to_lark(pattern, 'dw')}/"


def has_looks(pattern: str) -> bool:
    """Whether a pattern has a look-around or a back-reference, which llguidance does not support."""
    return any(
        BACK_REFERENCE.match(found[0]) or (found[0] == "(" and LOOK.match(pattern, found.start()))
        for found in PIECE.finditer(pattern)
    )


def searched(pattern: str) -> str:
    """Return a lexeme of all texts that contain a match, or "" for patterns with look-arounds or inner anchors."""
    branches: list[list[str]] = [[]]
    depth = 0
    if has_looks(pattern):
        return ""
    for piece in PIECE.findall(pattern):
        if piece[0] == "[" and piece[-1] != "]":  # not closed: llguidance reports it
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
    """Return a lexeme of the `names` that match all `patterns`, match none of `without`, and are not in `taken`."""
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
    """Whether a pattern matches anywhere in a text, in linear time. False for unsupported patterns."""
    written = searched(pattern)
    return bool(written) and _lexer(written).accepts(list(text.encode(errors="surrogatepass")))


class _Lexer:
    """A compiled lexeme. Its automaton grows with the texts it reads, up to a limit."""

    def __init__(self, written: str) -> None:
        self._written, self._is_new = written, True
        self._matcher = self._compiled()

    def accepts(self, text: list[int]) -> bool:
        """Whether the lexeme matches the whole text. False for unsupported lexemes, and texts over the limit."""
        was_new, self._is_new = self._is_new, False
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting():
            return True
        if not matcher.is_error() or self._matcher.is_error():
            return False
        self._matcher, self._is_new = self._compiled(), True  # all copies share the limit
        return not was_new and self.accepts(text)

    def _compiled(self) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(_bytes(), f"start: TEXT\nTEXT: {self._written}\n", log_level=0)


@lru_cache(LEXERS_KEPT)
def _lexer(written: str) -> _Lexer:
    return _Lexer(written)


@lru_cache(1)
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def none_of(texts: Iterable[str]) -> str:
    """Return a pattern of every text except these. Raises ValueError if they are too long."""
    return f"^{_other_than(_tree(texts))}$"


def none_begins(prefixes: Iterable[str]) -> str:
    """Return a pattern of every text that begins with none of these. Raises ValueError if they are too long."""
    return f"^{_beginning_otherwise(_tree(prefixes))}$"


def texts_of(pattern: object) -> tuple[list[str], bool] | None:
    """Enumerate the texts of a pattern like `^(a|b)$`, or the prefixes of one like `^(a|b)`.

    Returns the texts and whether they are whole texts. Returns None for any other pattern.
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
        if "|" in inner:  # `^` and `$` would each belong to one alternative
            return None
    found = inner.split("|")
    if not all(PLAIN_TEXT.fullmatch(each) for each in found) or any(each.endswith("\\") for each in found):
        return None
    return [re.sub(r"\\(.)", r"\1", each) for each in found], is_whole


def beginning_of(pattern: object) -> str:
    """Return the literal with which all matches begin ("ab" for `^abc?`), or "" if there is none."""
    if not isinstance(pattern, str) or not pattern.startswith("^") or "|" in pattern:
        return ""
    found = PLAIN_TEXT.match(pattern, 1)
    literal = found[0] if found else ""
    if pattern[1 + len(literal) : 2 + len(literal)] in ("?", "*", "{"):  # the last character is optional
        literal = literal[: -2 if literal[-2:-1] == "\\" else -1]
    return re.sub(r"\\(.)", r"\1", literal)


def _tree(texts: Iterable[str]) -> _Tree:
    """Build a trie of the texts. `_END` marks the end of a text."""
    root: _Tree = {}
    left = MAX_CHARS
    for text in texts:
        left -= len(text) + 1
        if left < 0:
            raise ValueError(f"the excluded texts have more than {MAX_CHARS:,} characters")
        here = root
        for character in text:
            here = here.setdefault(character, {})
        here[_END] = {}
    return root


def _other_than(tree: _Tree) -> str:
    """Return a pattern of everything that may follow a node so that the whole is none of the trie's texts."""
    characters, tail = _followers(tree)
    branches = [_class(characters, negated=True) + f"{ANY_CHARACTER}*"]
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
    branches = [_class(characters, negated=True) + f"{ANY_CHARACTER}*"]
    for character in characters:
        if _END not in tree[character]:
            branches.append(_class([character]) + _beginning_otherwise(tree[character]))
    return f"(?:{'|'.join(branches)})?"


def _class(characters: Sequence[str], *, negated: bool = False) -> str:
    if not characters:
        return ANY_CHARACTER if negated else "[]"
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 else rf"\{c}" if c in r"\]^-[&~|" else c for c in characters)
    return f"[{'^' if negated else ''}{escaped}]"
