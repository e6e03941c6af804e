"""Settings as fields of frozen dataclasses: a default, its help and its bounds are written once, in the field.

Every config object is checked when it is made. A bad value is a `ConfigError` with field, value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, get_type_hints

from common.errors import ConfigError

AUTO = "auto"
"""The value of a setting that a process chooses for itself."""

# The order in which `--help` and docs/reference/configuration.md show settings.
GROUPS = (
    "HTTP",
    "Workers",
    "Model",
    "Device",
    "KV cache",
    "Scheduling",
    "Transfer",
    "Sockets",
    "Deadlines",
    "Scaling",
    "Kubernetes",
    "Everywhere",
)

# Shapes that several settings have: keywords of `setting`.
FILE = {"metavar": "FILE"}
PORT = {"ge": 0, "le": 65535}
HOST = {"pattern": r"[A-Za-z0-9_.:-]+", "expects": "a host name or IP address"}
TIMEOUT = {"ge": 0.05, "le": 86400}
"""Seconds that must not be 0."""
DURATION = {"ge": 0, "le": 86400}
"""Seconds."""
GOAL_MS = {"ge": 0, "le": 3.6e6}

_META = "diptych"
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Rule:
    """What a field accepts, and the words for it. `pattern` must match the whole text; `expects` says it in words."""

    help: str
    group: str
    choices: tuple[Any, ...] = ()
    ge: float | None = None
    le: float | None = None
    pattern: str = ""
    expects: str = ""
    metavar: str = ""
    secret: bool = False
    in_file: bool = True
    once: str = ""
    """What to do in place of repeating the flag; "": the last of several values counts."""


def setting(default: Any, help: str, **rule: Any) -> Any:
    """A dataclass field of a `Config`; `rule` are the fields of `Rule`.

    The type comes from the annotation: str, int, float, bool or tuple[str, ...].
    """
    checked = Rule(help, **rule)
    return dataclasses.field(default=default, metadata={_META: checked}, repr=not checked.secret)


@dataclass(frozen=True)
class Field:
    """One setting of one config class, with every name it goes by."""

    name: str
    type: Any
    default: Any
    rule: Rule

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What the field takes, in words: for refusals and for the help."""
        rule = self.rule
        if rule.expects:
            return rule.expects
        if rule.choices:
            return "one of " + ", ".join(str(choice) for choice in rule.choices)
        if self.type is bool:
            return "true or false"
        noun = {int: "a whole number", float: "a number"}.get(self.type, "text")
        low = "" if rule.ge is None else f" from {rule.ge}"
        return noun + low + ("" if rule.le is None else f" to {rule.le}")

    def refuse(self, value: object) -> NoReturn:
        raise ConfigError(self.name, "***" if self.rule.secret else value, self.allowed)

    def parse(self, text: str) -> Any:
        """The value that `text` (a flag or an environment variable) stands for; bounds are checked by the class."""
        if self.type is bool:
            lowered = text.strip().lower()
            if lowered not in (*_TRUE, *_FALSE):
                self.refuse(text)
            return lowered in _TRUE
        if self.type in (int, float):
            try:
                return self.type(text.strip())
            except ValueError:
                self.refuse(text)
        if self.type is str:
            return text
        return tuple(part.strip() for part in text.split(",") if part.strip())

    def coerce(self, value: object) -> Any:
        """A TOML value as the field's type: arrays become tuples, whole numbers floats; nothing else changes."""
        if self.type is float and type(value) is int:
            return float(value)
        if isinstance(value, list):
            return tuple(value)
        return value

    def render(self, value: Any) -> str:
        """Inverse of `parse`."""
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value).lower() if self.type is bool else str(value)

    def check(self, value: object) -> None:
        """Type, choices, bounds and pattern. Raises ConfigError."""
        rule = self.rule
        if isinstance(value, tuple) and self.type not in (str, int, float, bool):
            members: tuple[object, ...] = value
            if not all(type(member) is str for member in members):
                self.refuse(value)
        elif type(value) is not self.type:
            self.refuse(value)
        else:
            members = (value,)
        for member in members:
            if rule.choices and member not in rule.choices:
                self.refuse(member)
            if rule.pattern and not re.fullmatch(rule.pattern, str(member)):
                self.refuse(member)
            if isinstance(member, int | float) and not isinstance(member, bool) and not _is_within(member, rule):
                self.refuse(member)


def _is_within(number: float, rule: Rule) -> bool:
    low, high = -math.inf if rule.ge is None else rule.ge, math.inf if rule.le is None else rule.le
    return math.isfinite(number) and low <= number <= high


@dataclass(frozen=True)
class Config:
    """Base of every settings class. `section` names its TOML table, `env_prefix` its own environment variables."""

    section: ClassVar[str] = ""
    env_prefix: ClassVar[str] = ""
    about: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            field.check(getattr(self, field.name))
        self.check()

    def check(self) -> None:
        """Checks over several fields. Raises ConfigError."""

    def check_start(self) -> None:
        """Checks for a process that is about to start, such as for an address that has no default."""


def fields_of(cls: type[Config]) -> tuple[Field, ...]:
    """Every setting of `cls`, in the order written, bases first."""
    if (known := _known_fields.get(cls)) is None:
        hints, fields = get_type_hints(cls), dataclasses.fields(cls)
        known = tuple(Field(f.name, hints[f.name], f.default, f.metadata[_META]) for f in fields if f.init)
        _known_fields[cls] = known  # to look up the types of a hundred fields takes 4 ms
    return known


_known_fields: dict[type[Config], tuple[Field, ...]] = {}


def to_argv(config: Config) -> list[str]:
    """Flags that rebuild `config` in another process: what differs from the defaults. Secrets are left to `to_env`."""
    argv: list[str] = []
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        if value == field.default or field.rule.secret:
            continue
        if field.type is bool:
            argv.append(field.flag if value else "--no-" + field.flag[2:])
        else:
            argv.append(f"{field.flag}={field.render(value)}")
    return argv


def to_env(config: Config) -> dict[str, str]:
    """The secrets of `config` as environment variables, which other users cannot read in the process list."""
    return {
        f"DIPTYCH_{config.env_prefix}_{field.name.upper()}": field.render(getattr(config, field.name))
        for field in fields_of(type(config))
        if field.rule.secret and getattr(config, field.name) != field.default
    }
