"""A scenario: pools of workers, links, routers, a load, goals, and what happens meanwhile.

A scenario is a TOML or JSON file; docs/guides/simulate.md describes it with examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from benchmarks.load.input_file import converted, read_table
from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS
from benchmarks.simulator.world.coefficients import StepCoefficients
from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.errors import ConfigError
from common.wire.message_fields import Role

Positive = Annotated[float, Meta(gt=0.0, le=1e18)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=0.5)]
Number = Annotated[int, Meta(ge=1, le=10**9)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: an unknown field is refused."""


class OtherRole(Part, frozen=True):
    """What the workers of a pool are in the other role; fields and defaults are those of a pool of that role."""

    coefficients: StepCoefficients
    max_num_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0
    max_step_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    watermark: Share = 0.02
    slo_tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] | None = None
    ahead: bool = True


class PoolSpec(Part, frozen=True):
    """`count` equal workers named `name-0`, `name-1`, ...; their links take `link_rate` bytes a second each way.

    `start_s` is how long a worker takes from its start until it is ready. With 0 `max_step_tokens` is the default of
    its role's setting, as are the others. `slo_tpot_ms` is the setting of decode workers by which they choose their
    batch and chunks, by default the scenario's goal. With `ahead` they launch a step before they have the tokens of
    the one before, as all on CPUs and those with recorded steps on GPUs do. The knobs of a `fixed` pool stand at their
    bounds, whatever goals requests have.

    Workers whose pools name the same `link` share that link, whatever model they serve; others have links of their own.

    With `other_role` routers that have the setting `role_change` may change its workers' roles. A worker that has
    drained is ready in its new role `role_change_s` later.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
    role: Role
    coefficients: StepCoefficients
    count: Annotated[int, Meta(ge=0, le=100_000)] = 1
    num_blocks: Annotated[int, Meta(ge=1, le=10**8)] = 65_536
    max_num_seqs: Annotated[int, Meta(ge=0, le=4096)] = 0
    max_step_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    watermark: Share = 0.02
    link_rate: Positive = 12.5e9
    link: Annotated[str, Meta(max_length=64)] = ""
    start_s: Seconds = 30.0
    slo_tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] | None = None
    ahead: bool = True
    fixed: bool = False
    other_role: OtherRole | None = None
    role_change_s: Seconds = 0.05

    def in_role(self, role: Role) -> PoolSpec:
        """The same workers in a role. Raises ConfigError if they are pinned to the other one."""
        if role == self.role:
            return self
        if self.other_role is None:
            raise ConfigError("pool.other_role", None, f"set for {self.name} as {role}")
        return msgspec.structs.replace(self, role=role, **msgspec.structs.asdict(self.other_role))

    @property
    def of_prefill(self) -> PrefillWorkerConfig:
        """Settings of prefill workers."""
        usual = PrefillWorkerConfig
        return PrefillWorkerConfig(
            max_num_seqs=self.max_num_seqs or usual.max_num_seqs,
            max_num_batched_tokens=self.max_step_tokens,
        )

    def of_decode(self, goal_ms: float) -> DecodeWorkerConfig:
        """Settings of decode workers with a goal for the time of a token; 0: none."""
        return DecodeWorkerConfig(
            max_num_seqs=self.max_num_seqs, local_prefill_chunk=self.max_step_tokens, slo_tpot_ms=float(goal_ms)
        )


class ModelSpec(Part, frozen=True):
    """What a token's KV takes, and how long a sequence may be. `window`: that of all layers, in tokens; 0: none."""

    kv_bytes_per_token: Annotated[int, Meta(ge=1, le=10**9)] = 131_072
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    max_model_len: Number = 131_072
    window: Annotated[int, Meta(ge=0, le=10**8)] = 0


class LoadPart(Part, frozen=True):
    """Requests at `rate` a second from `begin_s` to `end_s` of each period; an `end_s` of 0 is the period's end."""

    rate: Annotated[float, Meta(gt=0.0, le=1e6)]
    input_len: str = "512"
    output_len: str = "128"
    shared_prefix_len: Annotated[int, Meta(ge=0)] = 0
    begin_s: Seconds = 0.0
    end_s: Seconds = 0.0


class LoadSpec(Part, frozen=True):
    """Requests of a trace file, or at `rate` a second with lengths of the two ranges, or of `parts` at once.

    `copies` replays a trace so many times at once, each copy with prefixes of its own. `rates` are steps, as pairs of
    a time and the rate from then on; they win over `rate`. With `max_tokens` routers know only this bound of an
    answer's length. Each block id of a trace stands for `id_tokens` tokens.

    Parts begin again every `period_s` seconds; with 0 they have the scenario's whole time once.
    """

    trace: str = ""
    copies: Annotated[int, Meta(ge=1, le=10_000)] = 1
    speedup: Positive = 1.0
    jitter_s: Seconds = 0.0
    max_input_len: Annotated[int, Meta(ge=0)] = 0
    max_output_len: Annotated[int, Meta(ge=0)] = 0
    rate: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    rates: tuple[tuple[Seconds, Annotated[float, Meta(ge=0.0, le=1e6)]], ...] = ()
    input_len: str = "512"
    output_len: str = "128"
    shared_prefix_len: Annotated[int, Meta(ge=0)] = 0
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    id_tokens: Number = MOONCAKE_BLOCK_TOKENS
    parts: tuple[LoadPart, ...] = ()
    period_s: Seconds = 0.0

    def check(self, duration_s: float) -> None:
        """Checks over several fields. Raises ConfigError."""
        if self.parts and (self.trace or self.rate or self.rates):
            raise ConfigError("load.parts", len(self.parts), "empty with trace, rate or rates")
        if not self.parts and bool(self.trace) == bool(self.rate or self.rates):
            raise ConfigError("load.rate", self.rate, "above 0 without a trace, 0 with one")
        if not self.trace and not duration_s:
            raise ConfigError("duration_s", duration_s, "above 0 without a trace")
        if self.period_s and not self.parts:
            raise ConfigError("load.period_s", self.period_s, "0 without parts")
        longest_s = self.period_s or duration_s
        for number, part in enumerate(self.parts):
            end_s = part.end_s or longest_s
            if end_s > longest_s:
                raise ConfigError(f"load.parts[{number}].end_s", part.end_s, f"at most {longest_s:g}")
            if part.begin_s >= end_s:
                raise ConfigError(f"load.parts[{number}].begin_s", part.begin_s, f"below {end_s:g}, its end")


class Goals(Part, frozen=True):
    """Milliseconds; 0: no such goal."""

    ttft_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0
    tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0


class EventSpec(Part, frozen=True):
    """Something that happens at `at_s` to `worker`, or to the router of this name.

    death: its process ends, and connections to it break. With `back_s` another one is started so much later.
    silence: its machine is gone without a word: routers notice by missing heartbeats. `back_s` as above.
    stop: it takes no new requests, and ends once its last one has ended.
    slow: its steps take `factor` times as long from then on.
    start: another worker of the pool `worker` is started, and ready after its pool's `start_s`.
    router_death: `worker` is "router-0" or a later one. Its process ends, its clients lose their connections, and
        clients that come later go to the others. With `back_s` another router is started so much later.
    """

    at_s: Seconds
    kind: Literal["death", "silence", "stop", "slow", "start", "router_death"]
    worker: str
    factor: Positive = 1.0
    back_s: Seconds = 0.0


class Scenario(Part, frozen=True):
    """`duration_s` is how long requests arrive; 0: the whole trace. `noise` is that of each step's time.

    `settings` are router settings by name, such as `local_prefill_threshold`. With `fit` workers fit their models to
    their steps, as in life; without, they report their coefficients from their first step on, with `warm` at once.
    A request reaches its router `ingress_s` after its client sent it, and `ingress_token_s` later for each prompt
    token.

    Two things make a plain system of it, beside `policy`, settings and `slo_tpot_ms` of pools: a `prompt_order` of
    first-come, and workers that report nothing of how long their steps take (`reports_steps`), so that routers predict,
    hold and refuse nothing.

    `also` are scenarios of other models, which have `name`s. They run in the same time, and share the links that their
    pools name.
    """

    pool: Annotated[tuple[PoolSpec, ...], Meta(min_length=1)]
    load: LoadSpec
    model: ModelSpec = ModelSpec()
    goals: Goals = Goals()
    event: tuple[EventSpec, ...] = ()
    settings: dict[str, Any] = {}
    policy: str = "diptych"
    routers: Annotated[int, Meta(ge=1, le=64)] = 1
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    duration_s: Seconds = 0.0
    noise: Share = 0.04
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=10.0)] = 0.25
    message_s: Seconds = 0.0005
    link_s: Seconds = 0.0001
    fit: bool = False
    warm: bool = False
    ingress_s: Seconds = 0.0
    ingress_token_s: Seconds = 0.0
    prompt_order: Literal["slack", "first-come"] = "slack"
    reports_steps: bool = True
    name: Annotated[str, Meta(max_length=64)] = ""
    also: tuple[Scenario, ...] = ()

    def changed(self, **values: Any) -> Scenario:
        """The scenario with other values of fields, here and in those of other models."""
        also = tuple(other.changed(**values) for other in self.also)
        return msgspec.structs.replace(self, also=also, **values)

    def check(self) -> None:
        """Checks over several fields. Raises ConfigError."""
        names = [pool.name for pool in self.pool]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("pool.name", name, "unique among the pools")
        if not any(pool.role == "decode" for pool in self.pool):
            raise ConfigError("pool.role", sorted({pool.role for pool in self.pool}), "decode for at least one pool")
        self.load.check(self.duration_s)
        self._check_others()
        workers = {f"{pool.name}-{number}" for pool in self.pool for number in range(pool.count)}
        routers = {f"router-{number}" for number in range(self.routers)}
        for event in self.event:
            allowed = {"start": set(names), "router_death": routers}.get(event.kind, workers)
            if event.worker not in allowed:
                some = ", ".join(sorted(allowed)[:8])
                raise ConfigError("event.worker", event.worker, f"one of {some} for {event.kind}")

    def _check_others(self) -> None:
        models = [self.name, *(other.name for other in self.also)]
        rates: dict[str, float] = {}
        for scenario in (self, *self.also):
            if self.also and (not scenario.name or models.count(scenario.name) > 1):
                raise ConfigError("name", scenario.name, "unique among the models")
            for pool in scenario.pool:
                if pool.link and rates.setdefault(pool.link, pool.link_rate) != pool.link_rate:
                    raise ConfigError(
                        "pool.link_rate", pool.link_rate, f"{rates[pool.link]:g}, the rate of the link {pool.link}"
                    )
        for other in self.also:
            if other.also:
                raise ConfigError(
                    "also.also", len(other.also), "empty, because all models belong to the first scenario"
                )
            other.check()


def read_scenario(path: Path) -> Scenario:
    """The scenario of a `.toml` or `.json` file. Raises ConfigError."""
    return scenario_of(read_table(path, "scenario"))


def scenario_of(values: Any) -> Scenario:
    """The scenario of decoded TOML or JSON. Raises ConfigError with the field, its value and what is allowed."""
    scenario = converted(values, Scenario, "scenario")
    scenario.check()
    return scenario
