"""The settings of a router as they are for each of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.config import RouterConfig
from common.errors import ConfigError
from router.models.catalog import MODELS_FIELD
from router.models.entry import ModelEntry


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
