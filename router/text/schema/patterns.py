r"""Regular expressions as JSON Schema has them (ECMA-262), in the form that the grammar library reads.

Within brackets that library knows sets in sets and their differences: `[[a-z]*[-]?[a-z]*]*` would be one set with a `*`
in it, where it is a set, a `-` and another set. And its `.` is any character but `\n`, where ECMA's is no `\r` either.
(Nor U+2028 and U+2029, which stay: without them masks of `.{1,200}` take fourteen times as long.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SPECIAL = "[]&~-^"
"""Characters that may mean more than themselves within brackets."""
ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)", re.DOTALL)
SETS = "dDwWsSpP"
"""Letters behind a backslash that stand for several characters, so they begin and end no range."""
NO_BREAK = r"[^\n\r]"
HAS_FLAGS = re.compile(r"\(\?[a-zA-Z]*[sx]")
"""Flags of other dialects, with which a dot or a blank means something else."""


def portable(pattern: str) -> str:
    """The pattern, with the same matches in the library as in ECMA-262; unchanged where it is not closed."""
    if HAS_FLAGS.search(pattern):
        return pattern
    written, at = [], 0
    while at < len(pattern):
        if found := ESCAPE.match(pattern, at):
            written.append(found[0][1] if found[0] in (r"\<", r"\>") else found[0])
            at = found.end()
        elif pattern[at] == "[":
            end = _end_of_class(pattern, at)
            if not end:
                return pattern
            written.append(_class(pattern[at:end]))
            at = end
        else:
            written.append(NO_BREAK if pattern[at] == "." else pattern[at])
            at += 1
    return "".join(written)


def _end_of_class(pattern: str, begin: int) -> int:
    """Behind the bracket that closes the class; 0 where none does. One at the begin of a class is a member of it."""
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


def _class(text: str) -> str:
    """A class, of single characters and ranges of two alone."""
    is_negated = text.startswith("[^")
    members = list(_members(text[2 if is_negated else 1 : -1]))
    written, at = [], 0
    while at < len(members):
        ends = members[at : at + 3]
        if len(ends) == 3 and ends[1] == "-" and not any(_is_set(end) for end in (ends[0], ends[2])):
            written.append(f"{_alone(ends[0])}-{_alone(ends[2])}")
            at += 3
        else:
            written.append(_alone(members[at]))
            at += 1
    return f"[{'^' if is_negated else ''}{''.join(written)}]"


def _members(inside: str) -> Iterator[str]:
    """Characters, and escapes of one."""
    at = 0
    while at < len(inside):
        found = ESCAPE.match(inside, at)
        yield found[0] if found else inside[at]
        at = found.end() if found else at + 1


def _is_set(member: str) -> bool:
    return len(member) > 1 and member[1] in SETS


def _alone(member: str) -> str:
    if member == r"\b":  # within brackets a backspace
        return r"\x08"
    return "\\" + member if member in SPECIAL else member
