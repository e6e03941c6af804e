"""The input of a plan: a load, goals, two kinds of workers with their prices, bounds, and flags to try.

A TOML or JSON file; docs/guides/plan.md describes it. Load, model and coefficients are those of `diptych simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from benchmarks.load.input_file import converted
from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.simulator.world.scenario import LoadSpec, ModelSpec, Part, Positive, Seconds, Share
from common.errors import ConfigError

USUAL_REQUESTS, LEAST_DURATION_S = 600, 60.0
"""Without a duration a load at a rate lasts until about so many requests came, and so long at least."""
MOST_FOR_A_POOL = 1024

Few = Annotated[int, Meta(ge=1, le=1_000_000)]
Flags = Annotated[tuple[Few, ...], Meta(max_length=8)]
Thresholds = Annotated[tuple[Annotated[int, Meta(ge=0, le=1_000_000_000)], ...], Meta(max_length=8)]


class PlanGoals(Part, frozen=True):
    """The share `quantile` of all requests, refused ones included, should meet both; 0 ms: no such goal."""

    ttft_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0
    tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.95


class WorkerSpec(Part, frozen=True):
    """A kind of worker. `price` is that of an hour; at most `most` workers can be had; the rest as in a scenario."""

    coefficients: StepCoefficients
    price: Positive = 1.0
    most: Annotated[int, Meta(ge=0, le=MOST_FOR_A_POOL)] = 64
    num_blocks: Annotated[int, Meta(ge=1, le=10**8)] = 16_384
    max_num_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0
    max_step_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    watermark: Share = 0.02
    link_rate: Positive = 12.5e9


class BoundsSpec(Part, frozen=True):
    """`max_cost`: of an hour, in units of the prices; 0: none."""

    max_workers: Annotated[int, Meta(ge=1, le=2 * MOST_FOR_A_POOL)] = 16
    max_cost: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0


class SearchSpec(Part, frozen=True):
    """`seeds`: most runs of a candidate. The lists are flags by their name; the first value is tried with all pools.

    An empty list: the worker's own value of the kind, or the setting's default.
    """

    seeds: Annotated[int, Meta(ge=1, le=10)] = 5
    local_prefill_threshold: Thresholds = ()
    max_num_batched_tokens: Flags = ()
    max_num_seqs: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(max_length=8)] = ()
    local_prefill_chunk: Flags = ()


class PlanSpec(Part, frozen=True):
    """`duration_s` of 0: the beginning of a trace (`Stretch`), or about 600 requests at a rate. `settings` are router
    settings by name."""

    prefill: WorkerSpec
    decode: WorkerSpec
    load: LoadSpec
    goals: PlanGoals
    model: ModelSpec = ModelSpec()
    bounds: BoundsSpec = BoundsSpec()
    search: SearchSpec = SearchSpec()
    settings: dict[str, Any] = {}
    routers: Annotated[int, Meta(ge=1, le=64)] = 1
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 1
    duration_s: Seconds = 0.0
    noise: Share = 0.04

    def check(self) -> None:
        """Checks over several fields. Raises ConfigError."""
        goals, load = self.goals, self.load
        if not (goals.ttft_ms or goals.tpot_ms):
            raise ConfigError("goals.ttft_ms", goals.ttft_ms, "above 0 unless goals.tpot_ms is")
        if bool(load.trace) == bool(load.rate or load.rates):
            raise ConfigError("load.rate", load.rate, "above 0 without a trace, 0 with one")
        if load.rates and not self.duration_s:
            raise ConfigError("duration_s", self.duration_s, "above 0 with load.rates")
        if not self.prefill.coefficients.token_s and not self.decode.coefficients.token_s:
            raise ConfigError("prefill.coefficients", None, "coefficients with token_s above 0")
        if not self.decode.most:
            raise ConfigError("decode.most", self.decode.most, "at least 1")
        cheapest, bounds = self.decode.price, self.bounds
        if 0.0 < bounds.max_cost < cheapest:
            raise ConfigError(
                "bounds.max_cost", bounds.max_cost, f"at least {cheapest:g}, the price of one decode worker"
            )

    @property
    def arrivals_s(self) -> float:
        """How long requests arrive; 0: as long as the trace is."""
        if self.duration_s or self.load.trace:
            return self.duration_s
        return max(LEAST_DURATION_S, USUAL_REQUESTS / self.load.rate)


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `more` in their place, table by table."""
    found = dict(values)
    for key, value in more.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    return found


def spec_of(values: Mapping[str, Any]) -> PlanSpec:
    """The plan's input of decoded TOML or JSON. Raises ConfigError with the field, its value and what is allowed."""
    spec = converted(values, PlanSpec, "plan")
    spec.check()
    return spec
