"""A candidate: numbers of workers and flags, its cost, and the scenario that simulates it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from benchmarks.plan.spec import PlanGoals, PlanSpec, WorkerSpec
from benchmarks.simulator.world.scenario import Goals, LoadSpec, PoolSpec, Scenario
from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig
from common.config.field import Config, fields_of

LONG_S, FAR_APART = 7200.0, 4.0
"""Requests that come further apart arrive for so long at most, or so many times as long as those of the plan."""
FLAG_NAMES = ("local_prefill_threshold", "max_num_batched_tokens", "max_num_seqs", "local_prefill_chunk")


@dataclass(frozen=True, slots=True, order=True)
class Flags:
    """`local_prefill_threshold` is the router's, `max_num_batched_tokens` that of prefill workers; the others are of
    decode workers."""

    local_prefill_threshold: int
    max_num_batched_tokens: int
    max_num_seqs: int
    local_prefill_chunk: int

    def changes(self, base: Flags) -> str:
        """What differs from `base`, as flags."""
        found = [name for name in FLAG_NAMES if getattr(self, name) != getattr(base, name)]
        return " ".join(f"--{name.replace('_', '-')} {getattr(self, name)}" for name in found)


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """Without prefill workers there is one pool, which computes prompts as well."""

    num_prefill: int
    num_decode: int
    flags: Flags

    @property
    def is_one_pool(self) -> bool:
        return self.num_prefill == 0

    @property
    def shape(self) -> str:
        return f"one pool of {self.num_decode}" if self.is_one_pool else f"{self.num_prefill}P + {self.num_decode}D"

    def has_at_most(self, other: Candidate) -> bool:
        """Whether it has no more workers of either kind than a candidate with the same flags and number of pools."""
        alike = self.flags == other.flags and self.is_one_pool == other.is_one_pool
        return alike and self.num_prefill <= other.num_prefill and self.num_decode <= other.num_decode

    def cost(self, spec: PlanSpec) -> float:
        """Of an hour, in units of the prices."""
        return self.num_prefill * spec.prefill.price + self.num_decode * spec.decode.price

    def fits(self, spec: PlanSpec) -> bool:
        """Whether the bounds allow it."""
        bounds = spec.bounds
        return (
            self.num_prefill <= spec.prefill.most
            and 1 <= self.num_decode <= spec.decode.most
            and self.num_prefill + self.num_decode <= bounds.max_workers
            and (not bounds.max_cost or self.cost(spec) <= bounds.max_cost * (1 + 1e-9))
        )


def base_flags(spec: PlanSpec) -> Flags:
    """The first value of each list, or else the value of the worker or router, or else the default."""
    return Flags(*(values[0] for values in flag_values(spec)))


def flag_values(spec: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """The values to try of each flag, in the order of FLAG_NAMES. Workers that know a goal for tokens choose theirs up
    to the default."""
    search, usual = spec.search, DecodeWorkerConfig(slo_tpot_ms=float(spec.goals.tpot_ms))
    threshold = spec.settings.get("local_prefill_threshold", _default(RouterConfig, "local_prefill_threshold"))
    return (
        search.local_prefill_threshold or (int(threshold),),
        search.max_num_batched_tokens or (spec.prefill.max_step_tokens or PrefillWorkerConfig().step_tokens,),
        search.max_num_seqs or (spec.decode.max_num_seqs or usual.places,),
        search.local_prefill_chunk or (spec.decode.max_step_tokens or usual.step_tokens,),
    )


def varies(spec: PlanSpec) -> bool:
    """Whether any flag has several values to try."""
    return any(len(values) > 1 for values in flag_values(spec))


def _default(config: type[Config], name: str) -> int:
    return next(int(field.default) for field in fields_of(config) if field.name == name)


def shapes(spec: PlanSpec, flags: Flags, *, one_pool: bool) -> list[Candidate]:
    """All numbers of workers within the bounds, the cheapest first."""
    most = spec.bounds.max_workers
    numbers = (0,) if one_pool else range(1, min(spec.prefill.most, most) + 1)
    found = [
        candidate
        for num_prefill in numbers
        for num_decode in range(1, min(spec.decode.most, most) + 1)
        if (candidate := plain(Candidate(num_prefill, num_decode, flags), spec)).fits(spec)
    ]
    return sorted(found, key=lambda one: (one.cost(spec), one))


def every(spec: PlanSpec) -> list[Candidate]:
    """All candidates: each number of workers with each combination of flags, the cheapest first."""
    found = {
        candidate
        for values in itertools.product(*flag_values(spec))
        for one_pool in (True, False)
        for candidate in shapes(spec, Flags(*values), one_pool=one_pool)
    }
    return sorted(found, key=lambda one: (one.cost(spec), one))


def plain(candidate: Candidate, spec: PlanSpec) -> Candidate:
    """The same without what makes no difference: in one pool there is no worker that a prompt could be sent to."""
    if not candidate.is_one_pool:
        return candidate
    base = base_flags(spec)
    flags = replace(
        candidate.flags,
        local_prefill_threshold=base.local_prefill_threshold,
        max_num_batched_tokens=base.max_num_batched_tokens,
    )
    return replace(candidate, flags=flags)


def neighbours(candidate: Candidate, spec: PlanSpec) -> Iterator[Candidate]:
    """The same workers with one flag of another value."""
    for name, values in zip(FLAG_NAMES, flag_values(spec), strict=True):
        for value in values:
            other = plain(replace(candidate, flags=replace(candidate.flags, **{name: value})), spec)
            if other != candidate:
                yield other


def scenario(spec: PlanSpec, candidate: Candidate, seed: int, *, load_factor: float, goals: PlanGoals) -> Scenario:
    """A run of the candidate at `load_factor` times the rate.

    The same seed is the same load for each candidate; at another rate the same requests come, further apart. Of many
    requests that come far apart only the first ones are simulated.
    """
    flags = candidate.flags
    found = Scenario(
        pool=(
            _pool("prefill", spec.prefill, candidate.num_prefill, 0, flags.max_num_batched_tokens),
            _pool("decode", spec.decode, candidate.num_decode, flags.max_num_seqs, flags.local_prefill_chunk),
        ),
        load=_faster(spec.load, load_factor),
        model=spec.model,
        goals=Goals(ttft_ms=goals.ttft_ms, tpot_ms=goals.tpot_ms),
        settings={**spec.settings, "local_prefill_threshold": flags.local_prefill_threshold},
        routers=spec.routers,
        seed=seed,
        duration_s=_duration_s(spec.arrivals_s, load_factor),
        noise=spec.noise,
    )
    found.check()
    return found


def _pool(role: str, worker: WorkerSpec, count: int, max_num_seqs: int, step_tokens: int) -> PoolSpec:
    return PoolSpec(
        name=role,
        role="prefill" if role == "prefill" else "decode",
        count=count,
        coefficients=worker.coefficients,
        num_blocks=worker.num_blocks,
        max_num_seqs=max_num_seqs or worker.max_num_seqs,
        max_step_tokens=step_tokens,
        watermark=worker.watermark,
        link_rate=worker.link_rate,
    )


def _duration_s(arrivals_s: float, load_factor: float) -> float:
    """How long requests arrive at so many times the rate; 0: as long as the trace is."""
    if load_factor >= 1.0:
        return arrivals_s / load_factor
    most_s = max(LONG_S, FAR_APART * arrivals_s)
    return min(most_s, arrivals_s / load_factor or most_s)


def _faster(load: LoadSpec, factor: float) -> LoadSpec:
    """The load at so many times its rate; a trace is replayed so many times as fast."""
    if factor == 1.0:
        return load
    if load.trace:
        return msgspec.structs.replace(load, speedup=load.speedup * factor)
    rates = tuple((at_s / factor, rate * factor) for at_s, rate in load.rates)
    return msgspec.structs.replace(load, rate=load.rate * factor, rates=rates)
