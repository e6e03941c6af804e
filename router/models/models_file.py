"""The file of `--models-file`: TOML, one `[[model]]` table for each model, the default one first.

[[model]]
model = "org/small"            # as --model takes it; the rest is optional
name = "small"                 # as clients call it
aliases = ["fast"]
fallbacks = ["large"]          # models for its requests while it has no ready worker, or no room
hold = true                    # false: 503 at once while it has no ready worker, instead of a wait for one
prefill = false                # it has no prefill workers, and none is missed
requests_per_minute = 600      # of all keys together
tokens_per_minute = 1000000
concurrent_requests = 64
tool_parser = "hermes"         # of this model, if not that of --tool-parser
reasoning = "none"             # likewise
slo_ttft_ms = 500              # likewise: goals of its requests, in milliseconds
slo_tpot_ms = 40
min_decode = 1                 # likewise, as min_prefill: bounds of its pools, with --planner
max_decode = 8                 # and max_prefill
price_decode = 4.0             # and price_prefill: what one of its workers costs of --max-cost, which is for all models
decode_deployment = "small-d"  # and prefill_deployment, planner_lease: with --planner kubernetes

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
"""64 models and 256 splits, with names of any length, some times over."""
MAX_MODELS = 64
"""Each has a tokenizer in memory, and tasks and sockets of its own."""
MAX_SPLITS = 256
"""Each is a name that clients see."""
MAX_NAMES = 64
"""Aliases, fallbacks or weights of one entry."""
NAME = re.compile(r"[!-~]{1,256}")
GOALS = ("slo_ttft_ms", "slo_tpot_ms")
PLANNED = (
    *("min_prefill", "max_prefill", "min_decode", "max_decode", "price_prefill", "price_decode"),
    *("prefill_deployment", "decode_deployment", "planner_lease"),
)
"""Settings of the planner that a model may have of its own."""
MODEL_FIELDS = (
    *("model", "name", "aliases", "fallbacks", "hold", "prefill", *LIMITS, "tool_parser", "reasoning"),
    *(*GOALS, *PLANNED),
)
SPLIT_FIELDS = ("name", "weights")
AGREED_NAME = "models.toml"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to serve. `model` is what `--model` takes, `name` what clients call it; "": the model's own name.

    Requests for it go to the next of its `fallbacks` while it has no ready worker, or no room. Without `holds` they get
    503 at once while it has no ready worker, instead of waiting for one. Without `has_prefill` no prefill worker is
    missed. All keys together have its `limits`. `tool_parser`, `reasoning` and goals of the class `default` are those
    of the router unless they are given, as are settings of the planner; those that it has of its own are in `planned`.
    """

    model: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    holds: bool = True
    has_prefill: bool = True
    limits: Limits = Limits()
    tool_parser: str = ""
    reasoning: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    planned: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """A name whose requests are divided among models: each model's `weights` is its share."""

    name: str
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelTable:
    """All models of a router, the default one first, and its splits."""

    models: tuple[ModelEntry, ...]
    splits: tuple[Split, ...] = ()


def table_of(config: RouterConfig) -> ModelTable:
    """The models that a router's settings name: those of its file, or of `--model`.

    Raises ConfigError.
    """
    if config.models_file:
        return read_models(config.models_file)
    return ModelTable((ModelEntry(config.model, config.served_model_name),))


def read_models(path: str) -> ModelTable:
    """The models of a file. Raises ConfigError that names the table and the field."""
    return models_of(path, content_of(MODELS_FIELD, path, MAX_FILE_BYTES))


def models_of(path: str, data: bytes) -> ModelTable:
    """The models that the content of a file names. Raises ConfigError that names the table and the field."""
    table = toml_table(MODELS_FIELD, path, data, MAX_FILE_BYTES)
    if unknown := sorted(table.keys() - {"model", "split"}):
        raise ConfigError(MODELS_FIELD, path, f"only [[model]] and [[split]] tables, not {unknown[0]!r}")
    models = [_model(one) for one in _tables(path, table, "model", MAX_MODELS)]
    if not models:
        raise ConfigError(MODELS_FIELD, path, "at least one [[model]] table")
    return ModelTable(tuple(models), tuple(_split(one) for one in _tables(path, table, "split", MAX_SPLITS)))


class _Table:
    """One table of the file; its methods give checked values."""

    def __init__(self, path: str, where: str, values: Mapping[str, Any]) -> None:
        self._path, self._where, self._values = path, where, values

    def only(self, fields: tuple[str, ...]) -> None:
        for field in self._values:
            if field not in fields:
                self.refuse(field, f"only {', '.join(fields)}")

    def text(self, field: str, *, needed: bool = False) -> str:
        value = self._values.get(field, "")
        if not isinstance(value, str) or (value or needed) and not NAME.fullmatch(value):
            self.refuse(field, "a name of up to 256 printable ASCII characters without spaces")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        value = self._values.get(field, [])
        fits = isinstance(value, list) and len(value) <= MAX_NAMES
        if not fits or not all(isinstance(one, str) and NAME.fullmatch(one) for one in value):
            self.refuse(field, f"a list of up to {MAX_NAMES} names")
        return tuple(value)

    def flag(self, field: str, *, default: bool) -> bool:
        value = self._values.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "true or false")
        return value

    def limit(self, field: str) -> int:
        value = self._values.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
            self.refuse(field, "a whole number from 0 (no limit)")
        return value

    def goal(self, field: str) -> float:
        value = self._values.get(field, 0)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not GOAL_MS["ge"] <= value <= GOAL_MS["le"]:
            self.refuse(field, f"milliseconds, at most {GOAL_MS['le']:,} (0: the goal of the router)")
        return float(value)

    def planned(self) -> dict[str, int | float | str]:
        """The settings of the planner that the table has."""
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
            self.refuse(field, f"a table of up to {MAX_NAMES} models such as {{ small = 95, large = 5 }}")
        found: dict[str, float] = {}
        for name, weight in value.items():
            fits = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
            if not fits or not 0 <= weight <= MAX_LIMIT:
                self.refuse(f"{field}.{name}", "a number from 0")
            found[name] = float(weight)
        if not any(found.values()):
            self.refuse(field, "at least one number above 0")
        return found

    def refuse(self, field: str, allowed: str) -> NoReturn:
        raise ConfigError(MODELS_FIELD, self._path, f"{self._where}, {field}: {allowed}")


def _tables(path: str, table: Mapping[str, Any], kind: str, most: int) -> list[_Table]:
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ConfigError(MODELS_FIELD, path, f"[[{kind}]] tables")
    if len(entries) > most:
        raise ConfigError(MODELS_FIELD, path, f"at most {most} [[{kind}]] tables, not {len(entries):,}")
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
        tool_parser=table.text("tool_parser"),
        reasoning=table.text("reasoning"),
        slo_ttft_ms=table.goal("slo_ttft_ms"),
        slo_tpot_ms=table.goal("slo_tpot_ms"),
        planned=table.planned(),
    )


def _split(table: _Table) -> Split:
    table.only(SPLIT_FIELDS)
    return Split(table.text("name", needed=True), table.weights("weights"))


class ModelsSource:
    """`table` is in force from the start; `watch` notices a changed file, None without a file.

    The processes of one router go by the content that they accepted, also one that is started again after the file has
    changed into something that they refuse. Raises ConfigError.
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
        """What the file says now. Raises ConfigError."""
        self._content = content_of(MODELS_FIELD, self._path, MAX_FILE_BYTES)
        return models_of(self._path, self._content)

    def accept(self) -> None:
        """Put the content that was read last in force."""
        if self._agreed is not None:
            self._agreed.agree(self._content)


def settings_of(config: RouterConfig, entries: Mapping[str, ModelEntry]) -> list[RouterConfig]:
    """The settings for each model, by its name. Raises ConfigError for what does not fit together."""
    leases = [config.planner_lease]
    if len(entries) > 1:
        leases = [f"{config.planner_lease}-{number}" for number in range(1, len(entries) + 1)]
    return [_of_model(config, name, entry, lease) for (name, entry), lease in zip(entries.items(), leases, strict=True)]


def same_model(entry: ModelEntry) -> tuple[str, ...]:
    """What of an entry cannot change while the router runs."""
    others = (entry.slo_ttft_ms, entry.slo_tpot_ms, entry.has_prefill, *sorted(entry.planned.items()))
    return entry.model, entry.name, entry.tool_parser, entry.reasoning, *map(str, others)


def check_planned(config: RouterConfig, models: Sequence[RouterConfig]) -> None:
    """Whether the planner of a router can plan all of its models, whose own settings these are. Raises ConfigError."""
    for field in ("prefill_deployment", "decode_deployment"):
        if len(models) > 1 and (named := getattr(config, field)):
            raise ConfigError(field, named, "left out with several models: --models-file names those of each")
    if config.planner == "kubernetes" and all(one.planner != "kubernetes" for one in models):
        raise ConfigError(
            MODELS_FIELD, config.models_file, "a decode_deployment for a model, with --planner kubernetes"
        )
    cheapest = sum(one.min_prefill * one.price_prefill + one.min_decode * one.price_decode for one in models)
    if 0.0 < config.max_cost < cheapest:
        allowed = f"at least {cheapest:g}, the cost of the fewest workers of all models, or 0"
        raise ConfigError("max_cost", config.max_cost, allowed)


def _of_model(config: RouterConfig, name: str, entry: ModelEntry, lease: str) -> RouterConfig:
    planned = {"planner_lease": lease, **entry.planned}
    if config.planner == "kubernetes" and not (config.decode_deployment or "decode_deployment" in planned):
        planned["planner"] = "advice"  # its Deployments are scaled by others
    try:
        return replace(
            config,
            model=entry.model,
            served_model_name=name if entry.name else "",
            models_file="",
            tool_parser=entry.tool_parser or config.tool_parser,
            reasoning=entry.reasoning or config.reasoning,
            prefill=config.prefill if entry.has_prefill else (),
            prefill_services=config.prefill_services if entry.has_prefill else (),
            slo_ttft_ms=entry.slo_ttft_ms or config.slo_ttft_ms,
            slo_tpot_ms=entry.slo_tpot_ms or config.slo_tpot_ms,
            **planned,  # type: ignore[arg-type]  # checked as they were read
        )
    except ConfigError as error:
        raise ConfigError(MODELS_FIELD, config.models_file, f"{name}, {error.field}: {error.allowed}") from error
