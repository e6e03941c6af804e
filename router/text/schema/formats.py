"""Formats that the grammar library does not know, as regular expressions: those of JSON Schema that have a grammar.

`idn-email`, `idn-hostname` and `regex` stay annotations, as all names that JSON Schema does not define.
"""

from __future__ import annotations

from typing import Final


def _reference(letters: str, *, is_relative: bool) -> str:
    """RFC 3986, and with more letters RFC 3987: `scheme:...`, and without a scheme too if it may be relative."""
    coded = "%[0-9A-Fa-f]{2}"
    plain = rf"{letters}A-Za-z0-9\-._~!$&'()*+,;="
    inside, segment = rf"(?:[{plain}@]|{coded})", rf"(?:[{plain}:@]|{coded})"
    host = rf"(?:\[[0-9A-Fa-f:.]+\]|(?:[{plain}]|{coded})*)"
    authority = rf"(?:(?:[{plain}:]|{coded})*@)?{host}(?::[0-9]*)?"
    path = rf"(?:/{segment}*)*"
    rooted = rf"//{authority}{path}|/(?:{segment}+{path})?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{rooted}|{segment}+{path}|)"
    tail = rf"(?:\?(?:{segment}|[/?])*)?(?:#(?:{segment}|[/?])*)?"
    either = rf"(?:{absolute}|{rooted}|{inside}+{path}|)" if is_relative else absolute
    return f"^{either}{tail}$"


def _template() -> str:
    """RFC 6570: text with expressions like `{?first,second*}`."""
    coded = "%[0-9A-Fa-f]{2}"
    letter = rf"(?:[A-Za-z0-9_]|{coded})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    text = rf"[!#$&(-;=?-\[\]_a-z~{_LETTERS}]"
    return rf"^(?:{text}|{coded}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*$"


_LETTERS: Final = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\u{10000}-\u{1fffd}\u{20000}-\u{2fffd}\u{30000}-\u{3fffd}"
"""Beyond ASCII: RFC 3987's, those of planes that have any."""
_POINTER: Final = "(?:/(?:[^~/]|~[01])*)*"
_NUMBER: Final = "(?:0|[1-9][0-9]*)"
PATTERNS: Final = {
    "uri-reference": _reference("", is_relative=True),
    "iri": _reference(_LETTERS, is_relative=False),
    "iri-reference": _reference(_LETTERS, is_relative=True),
    "uri-template": _template(),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^{_NUMBER}(?:[+\-]{_NUMBER})?(?:#|{_POINTER})$",
}


def pattern_of(name: object) -> str:
    """The pattern of a format; "" of one that has none here."""
    return PATTERNS.get(name, "") if isinstance(name, str) else ""
