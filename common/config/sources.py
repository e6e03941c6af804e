"""Sources of settings and their precedence.

    defaults  <  TOML file (--config)  <  DIPTYCH_* environment  <  command-line flags

In the file, a `[section]` wins over a top-level key. In the environment, `DIPTYCH_DECODE_MAX_NUM_SEQS` wins over
`DIPTYCH_MAX_NUM_SEQS`. Top-level keys and unprefixed variables apply to every process that has the setting.
Unknown names and invalid values raise `ConfigError`.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.arguments import plain, suggestion
from common.config.decode_worker import DecodeWorkerConfig
from common.config.field import Config, Field, fields_of
from common.config.flags import MODEL, FlagParser
from common.config.prefill_worker import PrefillWorkerConfig
from common.config.rank_host import RankHostConfig
from common.config.router import RouterConfig
from common.config.serve import ServeConfig
from common.config.worker import WorkerConfig
from common.errors import ConfigError, UsageError

CONFIG_CLASSES: tuple[type[Config], ...] = (
    ServeConfig,
    RouterConfig,
    PrefillWorkerConfig,
    DecodeWorkerConfig,
    RankHostConfig,
)
C = TypeVar("C", bound=Config)
W = TypeVar("W", bound=WorkerConfig)

# Variables without a field: the folder of downloaded models, and the CPU type that kernels are compiled for.
OTHER_VARIABLES = ("DIPTYCH_CACHE", "DIPTYCH_MARCH")
# Settings of programs that bring their own config class. Other processes ignore them.
OTHER_PREFIXES = ("DIPTYCH_BENCH_",)
OTHER_SECTIONS = ("bench",)

NOTES = """\
Every option can also be set in the environment or in a TOML file (--config FILE). For {flag}:
  {variable:<40} in the environment, for every process that has the setting
  {own_variable:<40} in the environment, for this kind of process only
  {name} = ...  under [{section}] in the file, or above all sections for every process
A flag wins over the environment, and the environment over the file. See docs/reference/configuration.md."""


def variables_of(cls: type[Config]) -> dict[str, tuple[Field, bool]]:
    """Return the environment variables of a class: (field, whether only this kind of process reads it)."""
    shared = {f"DIPTYCH_{field.name.upper()}": (field, False) for field in fields_of(cls)}
    own = {f"DIPTYCH_{cls.env_prefix}_{field.name.upper()}": (field, True) for field in fields_of(cls)}
    return shared | own


@dataclass(frozen=True)
class Sources:
    """The TOML file at `path` and the environment."""

    file: Mapping[str, Any]
    environ: Mapping[str, str]
    path: str = ""

    @classmethod
    def open(cls, path: str, environ: Mapping[str, str], reader: type[Config]) -> Sources:
        """Read the TOML file (`path` may be empty) and the DIPTYCH_* variables for `reader`.

        Raises ConfigError for names that no process has.
        """
        classes = dict.fromkeys((*CONFIG_CLASSES, reader))
        ours = {name: text for name, text in environ.items() if name.startswith("DIPTYCH_")}
        known = {name for config in classes for name in variables_of(config)} | set(OTHER_VARIABLES)
        foreign = tuple(prefix for prefix in OTHER_PREFIXES if prefix != f"DIPTYCH_{reader.env_prefix}_")
        for name in ours:
            if name not in known and not name.startswith(foreign):
                raise UsageError(name, f"unknown environment variable {name}{suggestion(name, known)}")
        table = _read_toml(path)
        _check_names(table, classes, path)
        return cls(table, ours, path)

    def values(self, config: type[Config], skip: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the fields of `config`, except `skip`, that the file or the environment sets. Raises ConfigError."""
        by_name = {field.name: field for field in fields_of(config) if field.name not in skip}
        values: dict[str, Any] = {}
        for table in (self.file, self.file.get(config.section, {})):
            values.update({name: by_name[name].coerce(table[name]) for name in by_name if name in table})
        for own in (False, True):
            for variable, (field, is_own) in variables_of(config).items():
                if is_own is own and variable in self.environ and field.name in by_name:
                    try:
                        values[field.name] = field.parse(self.environ[variable])
                    except ConfigError as error:
                        raise error.located(f"invalid {variable}={error.value}") from None
        return values

    def place(self, config: type[Config], field: str, value: object) -> str:
        """Return where the environment or the file sets a field, for an error message, or ""."""
        prefix = f"DIPTYCH_{config.env_prefix}_"
        for variable in (prefix + field.upper(), "DIPTYCH_" + field.upper()):
            if variable in self.environ:
                return f"invalid {variable}={value}"
        if field in self.file.get(config.section, {}):
            return f"invalid {field} = {value!r} under [{config.section}] in {self.path}"
        return f"invalid {field} = {value!r} in {self.path}" if field in self.file else ""


def _read_toml(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", path, f"a readable TOML file ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError("config", path, f"a valid TOML file ({error})") from error


def _check_names(table: Mapping[str, Any], classes: Iterable[type[Config]], path: str) -> None:
    sections = {cls.section: {field.name for field in fields_of(cls) if field.rule.in_file} for cls in classes}
    everywhere = set().union(*sections.values()) - {"prefill", "decode"}  # numbers in [serve], addresses in [router]
    for name, value in table.items():
        if not isinstance(value, dict):
            if name not in everywhere:
                raise UsageError(name, f"unknown setting {name} in {path}{suggestion(name, everywhere)}")
        elif name in sections:
            for key in value:
                if key not in sections[name]:
                    close = suggestion(key, sections[name])
                    raise UsageError(f"{name}.{key}", f"unknown setting {key} under [{name}] in {path}{close}")
        elif name not in OTHER_SECTIONS:
            close = suggestion(f"[{name}]", (f"[{section}]" for section in sections))
            raise UsageError(f"[{name}]", f"unknown section [{name}] in {path}{close}")


def command_parser(cls: type[Config], prog: str = "") -> FlagParser:
    """Build the command-line parser of a process with the settings of `cls`."""
    field = next((field for field in fields_of(cls) if field.rule.common), fields_of(cls)[-1])
    notes = NOTES.format(
        flag=field.flag,
        name=field.name,
        section=cls.section,
        variable=f"DIPTYCH_{field.name.upper()}=...",
        own_variable=f"DIPTYCH_{cls.env_prefix}_{field.name.upper()}=...",
    )
    parser = FlagParser(prog or _prog_of(cls), cls.about, cls.examples, notes)
    parser.add_fields(fields_of(cls))
    return parser


def _prog_of(cls: type[Config]) -> str:
    return f"diptych {cls.section.replace('_', '-')}"


def located(
    error: ConfigError, cls: type[Config], flags: Mapping[str, str], sources: Sources, prefix: str = ""
) -> ConfigError:
    """Return `error` with the flag, variable or key that set the field. Flags may begin with `prefix`."""
    if error.is_located:
        return error
    for name in (prefix + error.field, error.field):
        if name in flags:
            if name == "model" and MODEL in flags:
                return error.located(f"invalid {MODEL} {shlex.quote(str(error.value))}")
            return error.located(as_flag(name, error.value))
    if place := sources.place(cls, error.field, error.value):
        return error.located(place)
    return with_flag(error, (cls,))


def with_flag(
    error: ConfigError, classes: Iterable[type[Config]] = CONFIG_CLASSES, options: Container[str] = ()
) -> ConfigError:
    """Return an error of a setting, or of one of a command's `options`, with its flag in place of the field's name."""
    is_field = any(field.name == error.field for cls in classes for field in fields_of(cls))
    if error.is_located or not (is_field or error.field in options):
        return error
    if error.value in ("", (), None):
        return error.located(f"missing --{error.field.replace('_', '-')}")
    return error.located(as_flag(error.field, error.value))


def as_flag(name: str, value: object) -> str:
    """Return how an error names a flag and its value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"invalid --{'' if value else 'no-'}{flag}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if isinstance(value, int | float) and math.isfinite(value):
        text = plain(value)
    return f"invalid --{flag} {text if text == '***' else shlex.quote(text)}"


def read(cls: type[C], argv: Sequence[str], *, prog: str = "", environ: Mapping[str, str] | None = None) -> C:
    """Merge all sources into a validated `cls`. Raises ConfigError; `--help` prints and exits."""
    environ = os.environ if environ is None else environ
    flags = command_parser(cls, prog).flags(argv)
    sources = Sources.open(flags.get("config", environ.get("DIPTYCH_CONFIG", "")), environ, cls)
    values = sources.values(cls)
    try:
        values.update({field.name: field.parse(flags[field.name]) for field in fields_of(cls) if field.name in flags})
        config = cls(**values)
        config.check_start()
    except ConfigError as error:
        raise located(error, cls, flags, sources) from error
    return config


def counterpart(config: WorkerConfig, cls: type[W], environ: Mapping[str, str] | None = None) -> W:
    """Return the settings of a worker in its other role.

    Settings that both roles have are copied. The file and the environment set the others. Raises ConfigError for
    settings that are invalid in that role.
    """
    sources = Sources.open(config.config, os.environ if environ is None else environ, cls)
    values = sources.values(cls)
    values.update({field.name: getattr(config, field.name) for field in fields_of(WorkerConfig)})
    return cls(**values)


def counterpart_env(config: WorkerConfig) -> dict[str, str]:
    """Return the variables from which `counterpart` rebuilds this `config` in a worker of the other role."""
    shared = {field.name for field in fields_of(WorkerConfig)}
    return {
        f"DIPTYCH_{config.env_prefix}_{field.name.upper()}": field.render(getattr(config, field.name))
        for field in fields_of(type(config))
        if field.name not in shared and getattr(config, field.name) != field.default
    }


def load(cls: type[C], argv: Sequence[str] | None = None, *, prog: str = "") -> C:
    """Call `read` for a `main()`. An invalid setting ends the process with one line on stderr and exit status 2."""
    try:
        return read(cls, sys.argv[1:] if argv is None else argv, prog=prog)
    except ConfigError as error:
        exit_refused(error, prog or _prog_of(cls))


def exit_refused(error: Exception, prog: str, options: Container[str] = ()) -> NoReturn:
    """End the process with one line on stderr and exit status 2. `options` are the command's own."""
    shown = with_flag(error, options=options) if isinstance(error, ConfigError) else error
    print(f"{prog}: {shown}", file=sys.stderr)
    raise SystemExit(2) from error
