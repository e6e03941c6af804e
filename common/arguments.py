"""Command-line parsers whose errors are one sentence on stderr with exit status 2."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

_PREFIX = re.compile(r"--(no-)?|DIPTYCH_")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_MISSING = re.compile(r"the following arguments are required: (.*)")
_ARGUMENT = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: (.*?) \(choose from (.*)\)")
_TYPE = re.compile(r"invalid (\w+) value: (.*)")
_QUOTE = "'"
_TYPES = {"int": "a whole number", "float": "a number"}


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" with the closest of `names`, or "" when none is similar."""
    by_word = {_PREFIX.sub("", one): one for one in names}
    close = difflib.get_close_matches(_PREFIX.sub("", name), list(by_word), n=1)
    return f"; did you mean {by_word[close[0]]}?" if close else ""


def unknown_arguments(arguments: Sequence[str], options: Iterable[str], prog: str, help_flag: str = "--help") -> str:
    """Describe the first of the arguments that a parser did not accept."""
    option = next((one for one in arguments if one.startswith("-")), "").partition("=")[0]
    if not option:
        return f"unexpected argument {arguments[0]!r}"
    hint = suggestion(option, (name for name in options if name.startswith("--")))
    return f"unknown option {option}{hint or f'; {prog} {help_flag} lists all options'}"


def usage_error(message: str, options: Iterable[str], prog: str) -> str:
    """Rewrite a message of argparse as one plain sentence."""
    if found := _UNKNOWN.fullmatch(message):
        return unknown_arguments(found[1].split(), options, prog)
    if found := _MISSING.fullmatch(message):
        return f"missing {found[1]}; {prog} --help lists the options"
    if not (found := _ARGUMENT.fullmatch(message)):
        return message
    name, reason = found[1], found[2]
    if reason.startswith("expected"):
        return f"option {name} needs a value"
    if reason.startswith("ignored explicit argument"):
        return f"option {name} takes no value"
    if choice := _CHOICE.fullmatch(reason):
        return f"invalid {name} {choice[1].strip(_QUOTE)}: must be one of {choice[2].replace(_QUOTE, '')}"
    if kind := _TYPE.fullmatch(reason):
        return f"invalid {name} {kind[2].strip(_QUOTE)}: must be {_TYPES.get(kind[1], f'a valid {kind[1]}')}"
    if ": must " in reason:
        return f"invalid {name} {reason}"
    return f"{name}: {reason}"


class CommandParser(argparse.ArgumentParser):
    """An argument parser that accepts no abbreviations."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def format_help(self) -> str:
        """Return the help with a usage line of positional arguments only, because options are listed below it."""
        if self.usage is None:
            names = (
                f" [{one.metavar or one.dest}]" if one.nargs == "?" else f" {one.metavar or one.dest}"
                for one in self._get_positional_actions()
            )
            self.usage = "%(prog)s [options]" + "".join(names)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {usage_error(message, self._option_string_actions, self.prog)}", file=sys.stderr)
        raise SystemExit(2)


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float | None = None, whole: bool = False
) -> Callable[[str], Any]:
    """Return an argparse type for finite numbers from `low`, or greater than `above`, to `high`."""
    expected = "a whole number" if whole else "a number"
    if above is not None:
        expected += f" above {plain(above)}" + (f" and up to {plain(high)}" if high < math.inf else "")
    elif high < math.inf:
        expected += f" from {plain(low)} to {plain(high)}"
    elif low > -math.inf:
        expected += f" of at least {plain(low)}"

    def parse(text: str) -> int | float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high and (above is None or value > above)):
            raise argparse.ArgumentTypeError(f"{text}: must be {expected}")
        return value

    return parse


def plain(value: float) -> str:
    """Format a number without an exponent when it is whole."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
