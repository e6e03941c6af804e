"""Format of `--models-file`: TOML with one `[[model]]` table per model, starting with the default model.

[[model]]
model = "org/small"            # as for --model; all other fields are optional
name = "small"                 # name for clients
aliases = ["fast"]
fallbacks = ["large"]          # models that serve its requests while it has no ready worker or no capacity
hold = true                    # false: respond with 503 while it has no ready worker, instead of waiting for one
prefill = false                # it has no prefill workers; do not report them as missing
requests_per_minute = 600      # total of all keys
tokens_per_minute = 1000000
concurrent_requests = 64
chat_template = "small.jinja"  # file; default: the model's own template
tool_parser = "hermes"         # default: --tool-parser
reasoning = "none"             # default: --reasoning
reasoning_start = "[THINK]"    # default: --reasoning-start, also reasoning_end
slo_ttft_ms = 500              # latency goals in milliseconds; default: --slo-ttft-ms, --slo-tpot-ms
slo_tpot_ms = 40
slo_refuse = "predicted"       # default: --slo-refuse
min_decode = 1                 # pool size limits for --planner, also min_prefill
max_decode = 8                 # and max_prefill
price_decode = 4.0             # cost of one worker, also price_prefill; --max-cost limits the total of all models
decode_deployment = "small-d"  # for --planner kubernetes, also prefill_deployment and planner_lease

[[split]]
name = "chat"
weights = { small = 95, large = 5 }
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from common.config import GOAL_MS, RouterConfig, fields_of
from common.errors import ConfigError
from router.access import LIMITS, MAX_LIMIT, FileWatch, Limits, content_of
from router.access import table_of as toml_table
from router.siblings import AgreedFile, RouterPart

MODELS_FIELD = "models_file"
MAX_FILE_BYTES = 1024 * 1024
"""Maximum size of the file, several times what 64 models and 256 splits need."""
MAX_MODELS = 64
"""Maximum number of models. Each has a tokenizer in memory, and its own tasks and sockets."""
MAX_SPLITS = 256
"""Maximum number of splits. Each is a name for clients."""
MAX_NAMES = 64
"""Maximum number of aliases, fallbacks or weights of one entry."""
MAX_MARK_CHARS = 256
NAME = re.compile(r"[!-~]{1,256}")
GOALS = ("slo_ttft_ms", "slo_tpot_ms")
PLANNED = (
    *("min_prefill", "max_prefill", "min_decode", "max_decode", "price_prefill", "price_decode"),
    *("prefill_deployment", "decode_deployment", "planner_lease"),
)
"""Planner settings that a model can override."""
OVERRIDES = ("chat_template", "tool_parser", "reasoning", "reasoning_start", "reasoning_end", *GOALS, "slo_refuse")
"""Other settings that a model can override. If empty, the router's apply."""
MODEL_FIELDS = (
    *("model", "name", "aliases", "fallbacks", "hold", "prefill", "reasoning_in_form"),
    *(*LIMITS, *OVERRIDES, *PLANNED),
)
SPLIT_FIELDS = ("name", "weights")
AGREED_NAME = "models.toml"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to serve. `model` is a value of `--model`. `name` is for clients; if empty, the model's own name is used.

    While it has no ready worker or no capacity, `fallbacks` serve its requests, in order. Unless it `holds`, requests
    fail with 503 while it has no ready worker, instead of waiting. If not `has_prefill`, missing prefill workers are
    not reported. `limits` apply to all keys together. `chat_template` is a file; if empty, the model's own is used.
    Empty values of `tool_parser`, of `reasoning`, its marks and `reasoning_in_form`, and of the goals and refusals of
    class `default` mean the router's.
    `planned` are the planner settings that this model overrides.
    """

    model: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    holds: bool = True
    has_prefill: bool = True
    limits: Limits = Limits()
    chat_template: str = ""
    tool_parser: str = ""
    reasoning: str = ""
    reasoning_start: str = ""
    reasoning_end: str = ""
    reasoning_in_form: bool | None = None
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    slo_refuse: str = ""
    planned: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """A name whose requests are distributed among models in proportion to `weights`."""

    name: str
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelTable:
    """All models of a router, starting with the default model, and its splits."""

    models: tuple[ModelEntry, ...]
    splits: tuple[Split, ...] = ()


def table_of(config: RouterConfig) -> ModelTable:
    """Return the models of `--models-file` or `--model`. Raises ConfigError."""
    if config.models_file:
        return read_models(config.models_file)
    return ModelTable((ModelEntry(config.model, config.served_model_name),))


def read_models(path: str) -> ModelTable:
    """Read a models file. Raises ConfigError, which names the table and the field."""
    return models_of(path, content_of(MODELS_FIELD, path, MAX_FILE_BYTES))


def models_of(path: str, data: bytes) -> ModelTable:
    """Parse the content of a models file. Raises ConfigError, which names the table and the field."""
    table = toml_table(MODELS_FIELD, path, data, MAX_FILE_BYTES)
    if unknown := sorted(table.keys() - {"model", "split"}):
        raise ConfigError(MODELS_FIELD, path, f"a file of [[model]] and [[split]] tables, without {unknown[0]!r}")
    models = [_model(one) for one in _tables(path, table, "model", MAX_MODELS)]
    if not models:
        raise ConfigError(MODELS_FIELD, path, "a file with at least one [[model]] table")
    return ModelTable(tuple(models), tuple(_split(one) for one in _tables(path, table, "split", MAX_SPLITS)))


class _Table:
    """One table of the file. Its methods return validated values, or raise ConfigError."""

    def __init__(self, path: str, where: str, values: Mapping[str, Any]) -> None:
        self._path, self._where, self._values = path, where, values

    def only(self, fields: tuple[str, ...]) -> None:
        for field in self._values:
            if field not in fields:
                self.refuse(field, f"one of the fields {', '.join(fields)}")

    def text(self, field: str, *, needed: bool = False) -> str:
        value = self._values.get(field, "")
        if not isinstance(value, str) or (value or needed) and not NAME.fullmatch(value):
            self.refuse(field, "a name of up to 256 printable ASCII characters without spaces")
        return value

    def mark(self, field: str) -> str:
        value = self._values.get(field, "")
        if not isinstance(value, str) or len(value) > MAX_MARK_CHARS or value != value.strip():
            self.refuse(field, f"a text of up to {MAX_MARK_CHARS} characters without white space around it")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        value = self._values.get(field, [])
        fits = isinstance(value, list) and len(value) <= MAX_NAMES
        if not fits or not all(isinstance(one, str) and NAME.fullmatch(one) for one in value):
            self.refuse(field, f"a list of up to {MAX_NAMES} names")
        return tuple(value)

    def flag(self, field: str, *, default: bool) -> bool:
        value = self.choice(field)
        return default if value is None else value

    def choice(self, field: str) -> bool | None:
        value = self._values.get(field)
        if value is not None and not isinstance(value, bool):
            self.refuse(field, "true or false")
        return value

    def limit(self, field: str) -> int:
        value = self._values.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
            self.refuse(field, f"an integer from 0 (no limit) to {MAX_LIMIT:,}")
        return value

    def goal(self, field: str) -> float:
        value = self._values.get(field, 0)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not GOAL_MS["ge"] <= value <= GOAL_MS["le"]:
            self.refuse(field, f"{GOAL_MS['ge']:g} (the router's goal) to {GOAL_MS['le']:,} milliseconds")
        return float(value)

    def planned(self) -> dict[str, int | float | str]:
        """Return the planner settings in the table."""
        found: dict[str, int | float | str] = {}
        for field in fields_of(RouterConfig):
            if field.name not in PLANNED or field.name not in self._values:
                continue
            found[field.name] = field.coerce(self._values[field.name])
            try:
                field.check(found[field.name])
            except ConfigError as error:
                self.refuse(field.name, error.allowed)
        return found

    def weights(self, field: str) -> dict[str, float]:
        value = self._values.get(field)
        if not isinstance(value, dict) or not 0 < len(value) <= MAX_NAMES:
            self.refuse(field, f"a table of 1 to {MAX_NAMES} models such as {{ small = 95, large = 5 }}")
        found: dict[str, float] = {}
        for name, weight in value.items():
            fits = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
            if not fits or not 0 <= weight <= MAX_LIMIT:
                self.refuse(f"{field}.{name}", f"a number from 0 to {MAX_LIMIT:,}")
            found[name] = float(weight)
        if not any(found.values()):
            self.refuse(field, "a table with at least one number above 0")
        return found

    def refuse(self, field: str, allowed: str) -> NoReturn:
        raise ConfigError(MODELS_FIELD, self._path, f"a file with a valid {self._where}: {field} must be {allowed}")


def _tables(path: str, table: Mapping[str, Any], kind: str, most: int) -> list[_Table]:
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ConfigError(MODELS_FIELD, path, f"a file in which {kind!r} is a list of [[{kind}]] tables")
    if len(entries) > most:
        raise ConfigError(MODELS_FIELD, path, f"a file with at most {most} [[{kind}]] tables, not {len(entries):,}")
    return [_Table(path, f"{kind} {number}", one) for number, one in enumerate(entries, 1)]


def _model(table: _Table) -> ModelEntry:
    table.only(MODEL_FIELDS)
    return ModelEntry(
        model=table.text("model", needed=True),
        name=table.text("name"),
        aliases=table.names("aliases"),
        fallbacks=table.names("fallbacks"),
        holds=table.flag("hold", default=True),
        has_prefill=table.flag("prefill", default=True),
        limits=Limits(**{field: table.limit(field) for field in LIMITS}),
        chat_template=table.text("chat_template"),
        tool_parser=table.text("tool_parser"),
        reasoning=table.text("reasoning"),
        reasoning_start=table.mark("reasoning_start"),
        reasoning_end=table.mark("reasoning_end"),
        reasoning_in_form=table.choice("reasoning_in_form"),
        slo_ttft_ms=table.goal("slo_ttft_ms"),
        slo_tpot_ms=table.goal("slo_tpot_ms"),
        slo_refuse=table.text("slo_refuse"),
        planned=table.planned(),
    )


def _split(table: _Table) -> Split:
    table.only(SPLIT_FIELDS)
    return Split(table.text("name", needed=True), table.weights("weights"))


class ModelsSource:
    """The models in force (`table`). `watch` detects changes of the file; it is None without a file.

    The processes of one router use the content that they last accepted, even if one of them restarts after the file has
    become invalid. Raises ConfigError.
    """

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        self._path = config.models_file
        self._agreed = AgreedFile(part, AGREED_NAME) if part is not None and self._path else None
        self.watch: FileWatch | None = None
        if not self._path:
            self.table = table_of(config)
            return
        content = self._agreed.read() if self._agreed is not None else None
        self._content = content_of(MODELS_FIELD, self._path, MAX_FILE_BYTES) if content is None else content
        self.watch = FileWatch([self._path], known=self._content)
        self.table = models_of(self._path, self._content)
        self.accept()

    def read(self) -> ModelTable:
        """Read the current content of the file. Raises ConfigError."""
        self._content = content_of(MODELS_FIELD, self._path, MAX_FILE_BYTES)
        return models_of(self._path, self._content)

    def accept(self) -> None:
        """Put the content that was read last in force."""
        if self._agreed is not None:
            self._agreed.agree(self._content)


def settings_of(config: RouterConfig, entries: Mapping[str, ModelEntry]) -> list[RouterConfig]:
    """Return the settings of each model, in the order of `entries`. Raises ConfigError for conflicting settings."""
    leases = [config.planner_lease]
    if len(entries) > 1:
        leases = [f"{config.planner_lease}-{number}" for number in range(1, len(entries) + 1)]
    return [_of_model(config, name, entry, lease) for (name, entry), lease in zip(entries.items(), leases, strict=True)]


def fixed_part(entry: ModelEntry) -> ModelEntry:
    """Return an entry without the values that can change while the router runs."""
    return replace(entry, aliases=(), fallbacks=(), holds=True, limits=Limits())


def check_planned(config: RouterConfig, models: Sequence[RouterConfig]) -> None:
    """Check that the router's planner can plan all models, given their own settings. Raises ConfigError."""
    for field in ("prefill_deployment", "decode_deployment"):
        if len(models) > 1 and (named := getattr(config, field)):
            raise ConfigError(field, named, "empty with several models: set it for each model in --models-file")
    if config.planner == "kubernetes" and all(one.planner != "kubernetes" for one in models):
        raise ConfigError(
            MODELS_FIELD, config.models_file, "a file with a decode_deployment for a model, for --planner kubernetes"
        )
    cheapest = sum(one.min_prefill * one.price_prefill + one.min_decode * one.price_decode for one in models)
    if 0.0 < config.max_cost < cheapest:
        allowed = f"0 or at least {cheapest:g}, the cost of the minimum number of workers of all models"
        raise ConfigError("max_cost", config.max_cost, allowed)


def _of_model(config: RouterConfig, name: str, entry: ModelEntry, lease: str) -> RouterConfig:
    planned = {"planner_lease": lease, **entry.planned}
    in_form = config.reasoning_in_form if entry.reasoning_in_form is None else entry.reasoning_in_form
    if config.planner == "kubernetes" and not (config.decode_deployment or "decode_deployment" in planned):
        planned["planner"] = "advice"  # another party scales its Deployments
    try:
        return replace(
            config,
            model=entry.model,
            served_model_name=name if entry.name else "",
            models_file="",
            reasoning_in_form=in_form,
            prefill=config.prefill if entry.has_prefill else (),
            prefill_services=config.prefill_services if entry.has_prefill else (),
            **{field: getattr(entry, field) or getattr(config, field) for field in OVERRIDES},
            **planned,  # type: ignore[arg-type]  # checked as they were read
        )
    except ConfigError as error:
        raise ConfigError(
            MODELS_FIELD, config.models_file, f"a file with a valid {name}: {error.field} must be {error.allowed}"
        ) from error
