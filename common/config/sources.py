"""Where settings come from, and in which order.

    defaults  <  TOML file (--config)  <  DIPTYCH_* environment  <  command-line flags

In the file a `[section]` wins over a top-level key; in the environment `DIPTYCH_DECODE_MAX_NUM_SEQS` wins over
`DIPTYCH_MAX_NUM_SEQS`. A top-level key or an unprefixed variable holds for every process that has such a setting.
An unknown name or a bad value is a `ConfigError`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common import __version__
from common.config.decode_worker import DecodeWorkerConfig
from common.config.field import GROUPS, Config, Field, fields_of
from common.config.prefill_worker import PrefillWorkerConfig
from common.config.rank_host import RankHostConfig
from common.config.router import RouterConfig
from common.config.serve import ServeConfig
from common.config.worker import WorkerConfig
from common.errors import ConfigError

CONFIG_CLASSES: tuple[type[Config], ...] = (
    ServeConfig,
    RouterConfig,
    PrefillWorkerConfig,
    DecodeWorkerConfig,
    RankHostConfig,
)
C = TypeVar("C", bound=Config)
W = TypeVar("W", bound=WorkerConfig)

# No fields of a config class: the folder of fetched models, and the CPU that kernels are compiled for.
OTHER_VARIABLES = ("DIPTYCH_CACHE", "DIPTYCH_MARCH")
# Settings of programs above this layer, which bring their own config class. Other processes ignore them.
OTHER_PREFIXES = ("DIPTYCH_BENCH_",)
OTHER_SECTIONS = ("bench",)

EPILOG = """\
Each option can also be set by environment variable or in a TOML file (--config FILE). For {flag}:
  {variable:<40} in the environment, for every process that has it
  {own_variable:<40} in the environment, for this kind of process only
  {name} = ...  under [{section}] in the file, or above all sections for every process
A flag wins over the environment, the environment over the file. docs/reference/configuration.md lists everything."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The member of `names` that `name` was most likely meant to be."""
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def variables_of(cls: type[Config]) -> dict[str, tuple[Field, bool]]:
    """Environment variables of a class: (field, whether the variable is for this kind of process only)."""
    shared = {f"DIPTYCH_{field.name.upper()}": (field, False) for field in fields_of(cls)}
    own = {f"DIPTYCH_{cls.env_prefix}_{field.name.upper()}": (field, True) for field in fields_of(cls)}
    return shared | own


def group_order(field: Field) -> int:
    """Sorts settings as the help shows them: known groups in their order, a program's own groups before them."""
    return GROUPS.index(field.rule.group) if field.rule.group in GROUPS else -1


@dataclass(frozen=True)
class Sources:
    """File and environment. `open` refuses names that no process has."""

    file: Mapping[str, Any]
    environ: Mapping[str, str]

    @classmethod
    def open(cls, path: str, environ: Mapping[str, str], reader: type[Config]) -> Sources:
        """Read the TOML file (`path` may be empty) and the DIPTYCH_* variables for `reader`. Raises ConfigError."""
        classes = dict.fromkeys((*CONFIG_CLASSES, reader))
        ours = {name: text for name, text in environ.items() if name.startswith("DIPTYCH_")}
        known = {name for config in classes for name in variables_of(config)} | set(OTHER_VARIABLES)
        foreign = tuple(prefix for prefix in OTHER_PREFIXES if prefix != f"DIPTYCH_{reader.env_prefix}_")
        for name, text in ours.items():
            if name not in known and not name.startswith(foreign):
                raise ConfigError(name, text, f"no such variable, the nearest is {nearest(name, known)}")
        table = _read_toml(path)
        _check_names(table, classes)
        return cls(table, ours)

    def values(self, config: type[Config], skip: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The fields of `config`, except `skip`, that file or environment set. Raises ConfigError."""
        by_name = {field.name: field for field in fields_of(config) if field.name not in skip}
        values: dict[str, Any] = {}
        for table in (self.file, self.file.get(config.section, {})):
            values.update({name: by_name[name].coerce(table[name]) for name in by_name if name in table})
        for own in (False, True):
            for variable, (field, is_own) in variables_of(config).items():
                if is_own is own and variable in self.environ and field.name in by_name:
                    values[field.name] = field.parse(self.environ[variable])
        return values


def _read_toml(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", path, f"a TOML file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("config", path, f"a valid TOML file ({error})") from error


def _check_names(table: Mapping[str, Any], classes: Iterable[type[Config]]) -> None:
    sections = {cls.section: {field.name for field in fields_of(cls) if field.rule.in_file} for cls in classes}
    everywhere = set().union(*sections.values()) - {"prefill", "decode"}  # counts in one section, addresses in another
    for name, value in table.items():
        if not isinstance(value, dict):
            if name not in everywhere:
                raise ConfigError(name, value, f"no such setting, the nearest is {nearest(name, everywhere)}")
        elif name in sections:
            for key in value:
                if key not in sections[name]:
                    close = nearest(key, sections[name])
                    raise ConfigError(f"{name}.{key}", value[key], f"no such setting, the nearest is {close}")
        elif name not in OTHER_SECTIONS:
            raise ConfigError(f"[{name}]", "", f"no such section, the nearest is [{nearest(name, sections)}]")


class FlagParser(argparse.ArgumentParser):
    """argparse that raises ConfigError, takes no abbreviations and leaves every value as text."""

    def __init__(self, prog: str, about: str, epilog: str) -> None:
        super().__init__(
            prog=prog, description=about, epilog=epilog, allow_abbrev=False, formatter_class=_HelpFormatter
        )
        self.add_argument("--version", action="version", version=f"diptych {__version__}")
        self._groups: dict[str, Any] = {}
        self._once: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", message, f"see {self.prog} --help")

    def add_fields(self, fields: Iterable[Field], *, prefix: str = "", visible: bool = True) -> None:
        """One flag a field, named `--{prefix}{field}`, grouped for the help."""
        for field in sorted(fields, key=group_order):
            if field.rule.group not in self._groups:
                self._groups[field.rule.group] = self.add_argument_group(field.rule.group)
            group, flag = self._groups[field.rule.group], f"--{prefix}{field.flag[2:]}"
            options: dict[str, Any] = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
            options["help"] = _describe(field) if visible else argparse.SUPPRESS
            if field.type is bool:
                negative = f"--no-{flag[2:]}"
                shown, other = (negative, flag) if field.default else (flag, negative)
                group.add_argument(shown, action="store_const", const=str(shown == flag), **options)
                group.add_argument(
                    other, action="store_const", const=str(other == flag), **options | {"help": argparse.SUPPRESS}
                )
            elif field.rule.once:
                self._once[options["dest"]] = field.rule.once
                group.add_argument(flag, metavar=_metavar(field), action="append", **options)
            elif field.type in (str, int, float):
                group.add_argument(flag, metavar=_metavar(field), **options)
            else:
                group.add_argument(flag, metavar=_metavar(field), nargs="+", action="extend", **options)

    def flags(self, argv: Sequence[str]) -> dict[str, str]:
        """The flags given, as text by destination. Raises ConfigError for what is not a flag; `--help` exits."""
        given, unknown = self.parse_known_args(list(argv))
        if unknown:
            flag, _, value = unknown[0].partition("=")
            following = unknown[1] if len(unknown) > 1 and not value else value
            close = nearest(flag, (name for name in self._option_string_actions if name.startswith("--")))
            raise ConfigError(flag, following, f"no such option, the nearest is {close}")
        values: dict[str, str | list[str]] = vars(given)
        for name, instead in self._once.items():
            if len(several := values.get(name, ())) > 1 and isinstance(several, list):
                raise ConfigError(name, ", ".join(several), instead)
        return {name: ",".join(text) if isinstance(text, list) else text for name, text in values.items()}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, 120))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Leave the options out of the usage line: they are listed below it."""
        super().add_usage("%(prog)s [options]", actions, groups, prefix)


def _metavar(field: Field) -> str:
    return field.rule.metavar or {int: "N", float: "X"}.get(field.type, "TEXT").replace("TEXT", field.name.upper())


def _describe(field: Field) -> str:
    if field.type is bool:
        text = f"{field.rule.help} (default {'on' if field.default else 'off'})"
    else:
        default = field.render(field.default) or ("empty" if field.type is str else "none")
        bounds = f"; {field.allowed}" if field.rule.choices or field.rule.ge is not None else ""
        text = f"{field.rule.help} (default {default}{bounds})"
    return text.replace("%", "%%")


def _epilog(cls: type[Config]) -> str:
    field = fields_of(cls)[-1]
    return EPILOG.format(
        flag=field.flag,
        name=field.name,
        section=cls.section,
        variable=f"DIPTYCH_{field.name.upper()}=...",
        own_variable=f"DIPTYCH_{cls.env_prefix}_{field.name.upper()}=...",
    )


def read(cls: type[C], argv: Sequence[str], *, prog: str = "", environ: Mapping[str, str] | None = None) -> C:
    """All sources merged into one checked `cls`. Raises ConfigError; `--help` prints and exits."""
    environ = os.environ if environ is None else environ
    parser = FlagParser(prog or f"diptych {cls.section.replace('_', '-')}", cls.about, _epilog(cls))
    parser.add_fields(fields_of(cls))
    flags = parser.flags(argv)
    sources = Sources.open(flags.get("config", environ.get("DIPTYCH_CONFIG", "")), environ, cls)
    values = sources.values(cls)
    values.update({field.name: field.parse(flags[field.name]) for field in fields_of(cls) if field.name in flags})
    config = cls(**values)
    config.check_start()
    return config


def counterpart(config: WorkerConfig, cls: type[W], environ: Mapping[str, str] | None = None) -> W:
    """The settings of a worker's other role: what both roles have is copied, file and environment say the rest.

    Raises ConfigError for settings that no worker of that role could start with.
    """
    sources = Sources.open(config.config, os.environ if environ is None else environ, cls)
    values = sources.values(cls)
    values.update({field.name: getattr(config, field.name) for field in fields_of(WorkerConfig)})
    return cls(**values)


def counterpart_env(config: WorkerConfig) -> dict[str, str]:
    """The variables from which `counterpart` makes this `config` in a worker of the other role."""
    shared = {field.name for field in fields_of(WorkerConfig)}
    return {
        f"DIPTYCH_{config.env_prefix}_{field.name.upper()}": field.render(getattr(config, field.name))
        for field in fields_of(type(config))
        if field.name not in shared and getattr(config, field.name) != field.default
    }


def load(cls: type[C], argv: Sequence[str] | None = None, *, prog: str = "") -> C:
    """`read` for a `main()`: a refused setting is one line on stderr and exit status 2."""
    try:
        return read(cls, sys.argv[1:] if argv is None else argv, prog=prog)
    except ConfigError as error:
        exit_refused(error, prog or f"diptych {cls.section.replace('_', '-')}")


def exit_refused(error: Exception, prog: str) -> NoReturn:
    """End the process as every refused start does: one line on stderr, exit status 2."""
    print(f"{prog}: {error}", file=sys.stderr)
    raise SystemExit(2) from error
