"""What an operator says of one model, and of a name that stands for several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.access import Limits


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
    planned: Mapping[str, int | float | str] = field(default_factory=dict)


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
