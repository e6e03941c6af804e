"""Command-line parser of settings, with a short help of the common options and a complete one."""

from __future__ import annotations

import argparse
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from common import __version__
from common.arguments import CommandParser, plain, unknown_arguments, usage_error
from common.config.field import GROUPS, Field
from common.errors import UsageError

MODEL = "MODEL"
"""The positional argument of `diptych serve`."""
TRAILING = "--"
"""Precedes arguments of another program."""
MAX_WIDTH, OPTION_COLUMN = 110, 30


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=OPTION_COLUMN, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class FlagParser(CommandParser):
    """A parser that raises UsageError and returns every value as text."""

    def __init__(self, prog: str, about: str, examples: Sequence[tuple[str, str]] = (), notes: str = "") -> None:
        super().__init__(prog, add_help=False, formatter_class=_Formatter)
        self._about, self._notes = about, textwrap.dedent(notes).strip()
        commands = [f"  {command:<{OPTION_COLUMN + 20}}  # {comment}".rstrip(" #") for command, comment in examples]
        self._examples = "\n".join(("Examples:", *commands)) if examples else ""
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self._common: set[str] = set()
        self._once: dict[str, str] = {}
        self._trailing = ""
        self._optionals.title = "Help"
        self.add_argument("-h", "--help", action="help", help="show the most used options")
        self.add_argument("--help-all", action=_FullHelp, nargs=0, help="show all options")
        self.add_argument("--version", action="version", version=f"diptych {__version__}", help="show the version")

    def error(self, message: str) -> NoReturn:
        raise UsageError("command line", usage_error(message, self._option_string_actions, self.prog))

    def add_model(self, text: str) -> None:
        """Accept the model as a positional argument too."""
        self._group("Model").add_argument(MODEL, nargs="?", default=argparse.SUPPRESS, help=text)
        self._common.add(MODEL)

    def add_fields(self, fields: Iterable[Field], *, prefix: str = "", is_listed: bool = True) -> None:
        """Add a flag `--{prefix}{name}` for each field. Fields that are not listed are left out of the help."""
        for field in sorted(fields, key=lambda field: (group_order(field), not field.rule.common)):
            flag = f"--{prefix}{field.flag[2:]}"
            options: dict[str, Any] = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
            is_shown = is_listed and not field.rule.internal
            options["help"] = describe(field).replace("%", "%%") if is_shown else argparse.SUPPRESS
            if is_shown and field.rule.common and not (MODEL in self._common and field.name == "model"):
                self._common.add(field.name)
            group = self._group(field.rule.group)
            if field.type is bool:
                for name, value in ((flag, "True"), (f"--no-{flag[2:]}", "False")):
                    shown = options if (value == "False") is field.default else options | {"help": argparse.SUPPRESS}
                    group.add_argument(name, action="store_const", const=value, **shown)
            elif field.rule.trailing:
                self._trailing = self._trailing or field.name
                group.add_argument(flag, metavar=metavar(field), **options)
            elif field.rule.once:
                self._once[options["dest"]] = field.rule.once
                group.add_argument(flag, metavar=metavar(field), action="append", **options)
            elif field.type in (str, int, float):
                action = group.add_argument(flag, metavar=metavar(field), **options)
                if choices := [str(choice) for choice in field.rule.choices]:  # for argcomplete; the field validates
                    action.completer = lambda choices=choices, **_: choices  # type: ignore[attr-defined]
            else:
                group.add_argument(flag, metavar=metavar(field), nargs="+", action="extend", **options)

    def flags(self, argv: Sequence[str]) -> dict[str, str]:
        """Return the given flags as text by destination. Raises UsageError; `--help` exits."""
        argv, trailing = self._divided(list(argv))
        given, unknown = self.parse_known_args(argv)
        if unknown:
            message = unknown_arguments(unknown, self._option_string_actions, self.prog, "--help-all")
            raise UsageError(unknown[0].partition("=")[0], message)
        values: dict[str, str | list[str]] = vars(given)
        for name, instead in self._once.items():
            if len(several := values.get(name, ())) > 1 and isinstance(several, list):
                flag = "--" + name.replace("_", "-")
                raise UsageError(name, f"option {flag} is given {len(several)} times ({', '.join(several)}): {instead}")
        flags = {name: ",".join(text) if isinstance(text, list) else text for name, text in values.items()}
        if (model := flags.pop(MODEL, None)) is not None:
            if flags.setdefault("model", model) != model:
                raise UsageError("model", f"{MODEL} {model} and --model {flags['model']} differ: give one of them")
            flags[MODEL] = model
        if trailing:
            flags[self._trailing] = " ".join(filter(None, (flags.get(self._trailing), shlex.join(trailing))))
        return flags

    def _divided(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Return the options, and the arguments after a bare `--` if a field accepts them."""
        if not self._trailing or TRAILING not in argv:
            return argv, []
        at = argv.index(TRAILING)
        return argv[:at], argv[at + 1 :]

    def format_help(self) -> str:
        """Return the help with the common options."""
        listed = [action for group in self._groups.values() for action in group._group_actions if action.option_strings]
        num = sum(action.help != argparse.SUPPRESS for action in listed)
        more = f"{self.prog} --help-all lists all {num} options; docs/reference/configuration.md describes them."
        return self._help(self._groups.values(), lambda action: action.dest in self._common, more)

    def format_full_help(self) -> str:
        """Return the help with all options."""
        return self._help((*self._groups.values(), self._optionals), lambda action: True, self._notes)

    def _group(self, title: str) -> argparse._ArgumentGroup:
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def _help(
        self, groups: Iterable[argparse._ArgumentGroup], is_shown: Callable[[argparse.Action], bool], end: str
    ) -> str:
        formatter = self._get_formatter()
        model = f" [{MODEL}]" if MODEL in self._common else ""
        trailing = f" [{TRAILING} {self._trailing.upper()}]" if self._trailing else ""
        formatter.add_usage(f"%(prog)s{model} [options]{trailing}", (), ())
        formatter.add_text(textwrap.fill(self._about, formatter._width))
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_arguments(filter(is_shown, group._group_actions))
            formatter.end_section()
        formatter.add_text(self._examples)
        formatter.add_text(end)
        return formatter.format_help()


class _FullHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_full_help(), end="")
        parser.exit()


def group_order(field: Field) -> int:
    """Sort key of settings in the help."""
    return GROUPS.index(field.rule.group) if field.rule.group in GROUPS else -1


def metavar(field: Field) -> str:
    """Return the placeholder of a field's value in the help."""
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
