"""Command-line parser of settings, with a short help of the common options and a complete one."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from common import __version__
from common.arguments import plain, unknown_arguments
from common.config.field import GROUPS, Field
from common.errors import UsageError

MODEL = "MODEL"
"""The positional argument of `diptych serve`."""
MAX_WIDTH, OPTION_COLUMN = 110, 30
_NO_VALUE = re.compile(r"argument (--[\w-]+)[^:]*: (expected|ignored)")


@dataclass(frozen=True)
class Option:
    """One line of the help."""

    group: str
    name: str
    text: str
    is_common: bool


class FlagParser(argparse.ArgumentParser):
    """A parser that raises UsageError, accepts no abbreviations and returns every value as text."""

    def __init__(self, prog: str, about: str, examples: Sequence[tuple[str, str]] = (), notes: str = "") -> None:
        super().__init__(prog=prog, description=about, allow_abbrev=False, add_help=False)
        self._examples, self._notes = examples, notes
        self._options: list[Option] = []
        self._has_model = False
        self._once: dict[str, str] = {}
        self.add_argument("-h", "--help", action="help", help="show the most used options")
        self.add_argument("--help-all", action=_FullHelp, nargs=0, help="show all options")
        self.add_argument("--version", action="version", version=f"diptych {__version__}", help="show the version")

    def error(self, message: str) -> NoReturn:
        if found := _NO_VALUE.match(message):
            needs = "needs a value" if found[2] == "expected" else "takes no value"
            message = f"option {found[1]} {needs}"
        raise UsageError("command line", message)

    def add_model(self, text: str) -> None:
        """Accept the model as a positional argument too."""
        self.add_argument(MODEL, nargs="?", default=argparse.SUPPRESS, help=text)
        self._has_model = True
        self._options.append(Option("Model", MODEL, text, is_common=True))

    def add_fields(self, fields: Iterable[Field], *, prefix: str = "", is_listed: bool = True) -> None:
        """Add a flag `--{prefix}{name}` for each field. Fields that are not listed are left out of the help."""
        for field in sorted(fields, key=group_order):
            flag, text = f"--{prefix}{field.flag[2:]}", describe(field)
            options: dict[str, Any] = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
            is_shown = is_listed and not field.rule.internal
            options["help"] = text.replace("%", "%%") if is_shown else argparse.SUPPRESS
            if field.type is bool:
                for name, value in ((flag, "True"), (f"--no-{flag[2:]}", "False")):
                    shown = options if (value == "False") is field.default else options | {"help": argparse.SUPPRESS}
                    self.add_argument(name, action="store_const", const=value, **shown)
            elif field.rule.once:
                self._once[options["dest"]] = field.rule.once
                self.add_argument(flag, metavar=metavar(field), action="append", **options)
            elif field.type in (str, int, float):
                action = self.add_argument(flag, metavar=metavar(field), **options)
                if choices := [str(choice) for choice in field.rule.choices]:  # for argcomplete; the field validates
                    action.completer = lambda choices=choices, **_: choices  # type: ignore[attr-defined]
            else:
                self.add_argument(flag, metavar=metavar(field), nargs="+", action="extend", **options)
            if is_shown:
                shown_name = field.shown_flag if field.type is bool else f"{flag} {metavar(field)}"
                is_common = field.rule.common and not (self._has_model and field.name == "model")
                self._options.append(Option(field.rule.group, shown_name, text, is_common))

    def flags(self, argv: Sequence[str]) -> dict[str, str]:
        """Return the given flags as text by destination. Raises UsageError; `--help` exits."""
        given, unknown = self.parse_known_args(list(argv))
        if unknown:
            message = unknown_arguments(unknown, self._option_string_actions, self.prog, "--help-all")
            raise UsageError(unknown[0].partition("=")[0], message)
        values: dict[str, str | list[str]] = vars(given)
        for name, instead in self._once.items():
            if len(several := values.get(name, ())) > 1 and isinstance(several, list):
                flag = "--" + name.replace("_", "-")
                if "--models-file" not in self._option_string_actions:
                    instead = "a worker serves one model"
                raise UsageError(name, f"option {flag} is given {len(several)} times ({', '.join(several)}): {instead}")
        flags = {name: ",".join(text) if isinstance(text, list) else text for name, text in values.items()}
        if (model := flags.pop(MODEL, None)) is not None:
            if flags.setdefault("model", model) != model:
                raise UsageError("model", f"{MODEL} {model} and --model {flags['model']} differ: give one of them")
            flags[MODEL] = model
        return flags

    def format_help(self) -> str:
        """Return the help with the common options."""
        num = len(self._options) - self._has_model
        more = f"{self.prog} --help-all lists all {num} options; docs/reference/configuration.md describes them."
        return "\n".join((*self._head(), *self._listed(all_options=False), *self._example_lines(), more, ""))

    def format_full_help(self) -> str:
        """Return the help with all options."""
        notes = textwrap.dedent(self._notes).strip().splitlines()
        return "\n".join((*self._head(), *self._listed(all_options=True), *self._example_lines(), *notes, ""))

    def _head(self) -> list[str]:
        model = f" [{MODEL}]" if self._has_model else ""
        about = textwrap.wrap(self.description or "", _width())
        return [f"usage: {self.prog}{model} [options]", "", *about, ""]

    def _listed(self, *, all_options: bool) -> list[str]:
        """The options by group."""
        groups: dict[str, list[Option]] = {}
        for option in self._options:
            if all_options or option.is_common:
                groups.setdefault(option.group, []).append(option)
        for options in groups.values():
            options.sort(key=lambda option: not option.is_common)
        lines = []
        for group in sorted(groups, key=_position):
            lines += [f"{group}:", *(line for option in groups[group] for line in _lines(option.name, option.text)), ""]
        if all_options:
            lines += ["Help:", *_lines("--help", "show the most used options")]
            lines += [*_lines("--version", "show the version"), ""]
        return lines

    def _example_lines(self) -> list[str]:
        if not self._examples:
            return []
        lines = ["Examples:"]
        for command, comment in self._examples:
            lines.append(f"  {command:<{OPTION_COLUMN + 20}}  # {comment}" if comment else f"  {command}")
        return [*lines, ""]


class _FullHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_full_help(), end="")
        parser.exit()


def group_order(field: Field) -> int:
    """Sort key of settings in the help."""
    return _position(field.rule.group)


def _position(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else -1


def metavar(field: Field) -> str:
    """The placeholder of a value."""
    return field.rule.metavar or {int: "N", float: "X"}.get(field.type, field.name.rpartition("_")[2].upper())


def describe(field: Field) -> str:
    """Return the help of one option with its choices and its default."""
    rule = field.rule
    if field.type is bool:
        return rule.off if field.default else rule.help
    default = f"default: {rule.default_note}" if rule.default_note else f"default {default_of(field)}"
    choices = ", ".join(str(choice) for choice in rule.choices if choice not in (0, ""))
    facts = "; ".join(filter(None, (choices, default if default != "default " else "")))
    return f"{rule.help} ({facts})" if facts else rule.help


def default_of(field: Field) -> str:
    """Return the default as text."""
    return plain(field.default) if field.type in (int, float) else field.render(field.default)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def _lines(name: str, text: str) -> list[str]:
    """Format an option in two columns."""
    indent = " " * OPTION_COLUMN
    wrapped = textwrap.wrap(text, max(40, _width() - OPTION_COLUMN), break_on_hyphens=False, break_long_words=False)
    if len(name) + 2 > OPTION_COLUMN - 2:
        return [f"  {name}", *(indent + line for line in wrapped)]
    return [f"  {name:<{OPTION_COLUMN - 2}}{wrapped[0]}", *(indent + line for line in wrapped[1:])]
