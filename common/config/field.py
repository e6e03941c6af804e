"""Settings as fields of frozen dataclasses. Each field defines its default, help text and bounds.

Every config object is validated on construction. An invalid value raises `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, get_type_hints

from common.arguments import plain
from common.errors import ConfigError

AUTO = "auto"
"""The process chooses the value."""

# The order of settings in `--help-all` and docs/reference/configuration.md.
GROUPS = (
    "Model",
    "Server",
    "Workers",
    "Load on demand",
    "Goals",
    "Device",
    "KV cache",
    "Scheduling",
    "Speculative decoding",
    "LoRA",
    "Routing",
    "Security",
    "Autoscaling",
    "Responses, files and batches",
    "Timeouts",
    "KV transfer",
    "Sockets",
    "Kubernetes",
    "Configuration and logging",
)

# Keywords of `setting` that several settings share.
FILE = {"metavar": "FILE"}
PORT = {"ge": 0, "le": 65535}
HOST = {"pattern": r"[A-Za-z0-9_.:-]+", "expects": "a host name or IP address"}
TIMEOUT = {"ge": 0.05, "le": 86400}
"""Seconds, not 0."""
DURATION = {"ge": 0, "le": 86400}
"""Seconds, 0 included."""
GOAL_MS = {"ge": 0, "le": 3.6e6}

_META = "diptych"
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Rule:
    """Documentation and accepted values of a field."""

    help: str
    """One sentence without a full stop, shown by `--help-all`."""
    group: str
    off: str = ""
    """Help of `--no-NAME`: what happens without a feature that is on by default."""
    details: str = ""
    """Further sentences for docs/reference/configuration.md."""
    default_note: str = ""
    """Meaning of the default value, for example what 0 or an empty string selects."""
    common: bool = False
    """Shown by `--help`."""
    internal: bool = False
    """Set by `diptych serve` for its child processes and not listed in any help."""
    choices: tuple[Any, ...] = ()
    ge: float | None = None
    le: float | None = None
    pattern: str = ""
    """Regular expression for the whole text. `expects` describes it."""
    expects: str = ""
    metavar: str = ""
    secret: bool = False
    in_file: bool = True
    once: str = ""
    """Error for a repeated flag. If empty, the last value counts."""
    trailing: bool = False
    """Arguments of another program: text is split as in a shell, and arguments after a bare `--` are appended."""


def setting(default: Any, help: str, **rule: Any) -> Any:
    """Return a dataclass field of a `Config`. `rule` holds the fields of `Rule`.

    The annotation gives the type: str, int, float, bool or tuple[str, ...].
    """
    checked = Rule(help, **rule)
    return dataclasses.field(default=default, metadata={_META: checked}, repr=not checked.secret)


@dataclass(frozen=True)
class Field:
    """One setting of one config class."""

    name: str
    type: Any
    default: Any
    rule: Rule

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_flag(self) -> str:
        """The flag that changes the default: `--no-NAME` for a feature that is on by default."""
        return f"--no-{self.flag[2:]}" if self.default is True else self.flag

    @property
    def bounds(self) -> str:
        """The range of a number such as "0 to 65535", or ""."""
        rule = self.rule
        if rule.ge is None:
            return ""
        return f"{plain(rule.ge)} or more" if rule.le is None else f"{plain(rule.ge)} to {plain(rule.le)}"

    @property
    def allowed(self) -> str:
        """The accepted values in words, for errors and documentation."""
        rule = self.rule
        if rule.expects:
            return rule.expects
        if rule.choices:
            return "one of " + ", ".join(str(choice) for choice in rule.choices)
        if self.bounds:
            return self.bounds
        return {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "text")

    def refuse(self, value: object) -> NoReturn:
        """Raise ConfigError for `value`."""
        allowed = self.allowed
        if self.bounds and (isinstance(value, bool) or not isinstance(value, int | float)):
            noun = "a whole number" if self.type is int else "a number"
            allowed = f"{noun} from {self.bounds}" if self.rule.le is not None else f"{noun}, {self.bounds}"
        raise ConfigError(self.name, "***" if self.rule.secret else value, allowed)

    def parse(self, text: str) -> Any:
        """Convert the text of a flag or an environment variable. Bounds are checked by the class."""
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
        if self.rule.trailing:
            try:
                return tuple(shlex.split(text))
            except ValueError:  # a quote that is not closed
                self.refuse(text)
        return tuple(part.strip() for part in text.split(",") if part.strip())

    def coerce(self, value: object) -> Any:
        """Convert a TOML value: arrays to tuples, and whole numbers to floats for a float field."""
        if self.type is float and type(value) is int:
            return float(value)
        if isinstance(value, list):
            return tuple(value)
        return value

    def render(self, value: Any) -> str:
        """Inverse of `parse`."""
        if isinstance(value, tuple):
            return shlex.join(value) if self.rule.trailing else ",".join(value)
        return str(value).lower() if self.type is bool else str(value)

    def check(self, value: object) -> None:
        """Check type, choices, bounds and pattern. Raises ConfigError."""
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
    """Base of every settings class.

    `section` is the TOML table, `env_prefix` the prefix of environment variables, `about` a sentence for `--help`, and
    `examples` are command lines with a comment.
    """

    section: ClassVar[str] = ""
    env_prefix: ClassVar[str] = ""
    about: ClassVar[str] = ""
    examples: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            field.check(getattr(self, field.name))
        self.check()

    def check(self) -> None:
        """Check combinations of fields. Raises ConfigError."""

    def check_start(self) -> None:
        """Check what a process needs to start, such as an address without a default. Raises ConfigError."""


def fields_of(cls: type[Config]) -> tuple[Field, ...]:
    """Return every setting of `cls` in definition order, base classes first."""
    if (known := _known_fields.get(cls)) is None:
        hints, fields = get_type_hints(cls), dataclasses.fields(cls)
        known = tuple(Field(f.name, hints[f.name], f.default, f.metadata[_META]) for f in fields if f.init)
        _known_fields[cls] = known  # resolving the types of a hundred fields takes 4 ms
    return known


_known_fields: dict[type[Config], tuple[Field, ...]] = {}


def to_argv(config: Config) -> list[str]:
    """Return the flags that differ from the defaults, to rebuild `config` in another process. Excludes secrets."""
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
    """Return the secrets of `config` as environment variables, which are not visible in the process list."""
    return {
        f"DIPTYCH_{config.env_prefix}_{field.name.upper()}": field.render(getattr(config, field.name))
        for field in fields_of(type(config))
        if field.rule.secret and getattr(config, field.name) != field.default
    }
