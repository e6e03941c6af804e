r"""Regular expressions for formats that llguidance does not support or implements too permissively.

Dates and times follow RFC 3339, for the years 0001 to 9999, without leap seconds, which most libraries reject. Host
names have no labels like `ab--c`, because only some `xn--` labels are valid. `idn-email`, `idn-hostname`, `regex` and
formats that JSON Schema does not define remain annotations.
"""

from __future__ import annotations

from typing import Final

_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"


def _ipv6() -> str:
    """Return the pattern of RFC 4291 addresses.

    `::` replaces one or more of the eight groups. An IPv4 address may replace the last two groups.
    """
    group = "[0-9A-Fa-f]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    forms = [f"(?:{group}:){{6}}{last}"]
    for after in range(5, -1, -1):  # groups between `::` and the last two
        forms.append(f"{_groups(group, 5 - after)}::(?:{group}:){{{after}}}{last}")
    forms += [f"{_groups(group, 6)}::{group}", f"{_groups(group, 7)}::"]
    return f"(?:{'|'.join(forms)})"


def _groups(group: str, most: int) -> str:
    return f"(?:(?:{group}:){{0,{most - 1}}}{group})?" if most > 0 else ""


_IPV6: Final = _ipv6()


def _reference(letters: str, *, is_relative: bool) -> str:
    """Return the pattern of URIs (RFC 3986), or of IRIs (RFC 3987) if `letters` adds characters."""
    coded = "%[0-9A-Fa-f]{2}"
    plain = rf"{letters}A-Za-z0-9\-._~!$&'()*+,;="
    inside, segment = rf"(?:[{plain}@]|{coded})", rf"(?:[{plain}:@]|{coded})"
    literal = rf"\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+)\]"
    host = rf"(?:{literal}|(?:[{plain}]|{coded})*)"
    authority = rf"(?:(?:[{plain}:]|{coded})*@)?{host}(?::[0-9]*)?"
    path = rf"(?:/{segment}*)*"
    rooted = rf"//{authority}{path}|/(?:{segment}+{path})?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{rooted}|{segment}+{path}|)"
    tail = rf"(?:\?(?:{segment}|[/?])*)?(?:#(?:{segment}|[/?])*)?"
    either = rf"(?:{absolute}|{rooted}|{inside}+{path}|)" if is_relative else absolute
    return f"^{either}{tail}$"


def _template() -> str:
    """Return the pattern of RFC 6570 templates like `a{?first,second*}`, without the reserved operators."""
    coded = "%[0-9A-Fa-f]{2}"
    letter = rf"(?:[A-Za-z0-9_]|{coded})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    text = rf"[!#$&(-;=?-\[\]_a-z~{_LETTERS}]"
    return rf"^(?:{text}|{coded}|\{{[+#./;?&]?{variable}(?:,{variable})*\}})*$"


_LETTERS: Final = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\u{10000}-\u{1fffd}\u{20000}-\u{2fffd}\u{30000}-\u{3fffd}"
"""Non-ASCII characters of RFC 3987, from the planes that have any."""
_YEAR: Final = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+\-]{_HOUR_MINUTE})"
_ALNUM: Final = "[A-Za-z0-9]"
_LABEL: Final = (
    f"(?:{_ALNUM}(?:[A-Za-z0-9\\-]{{0,2}}{_ALNUM})?|"
    f"{_ALNUM}[A-Za-z0-9\\-](?:{_ALNUM}[A-Za-z0-9\\-]|-{_ALNUM})[A-Za-z0-9\\-]{{0,58}}{_ALNUM})"
)
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_POINTER: Final = "(?:/(?:[^~/]|~[01])*)*"
_NUMBER: Final = "(?:0|[1-9][0-9]*)"
PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "hostname": f"^{_HOST}$",
    "ipv6": f"^{_IPV6}$",
    "uri": _reference("", is_relative=False),
    "uri-reference": _reference("", is_relative=True),
    "iri": _reference(_LETTERS, is_relative=False),
    "iri-reference": _reference(_LETTERS, is_relative=True),
    "uri-template": _template(),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^{_NUMBER}(?:#|{_POINTER})$",
}


def pattern_of(name: object) -> str:
    """Return the pattern of a format, or "" if it has none."""
    return PATTERNS.get(name, "") if isinstance(name, str) else ""
