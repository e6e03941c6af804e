"""What is simulated: pools of workers, links, routers, a load, goals, and what happens meanwhile.

A scenario is a TOML or JSON file; docs/simulator.md describes it with examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from benchmarks.coefficients import StepCoefficients
from benchmarks.input_file import converted, read_table
from benchmarks.trace import MOONCAKE_BLOCK_TOKENS
from common.errors import ConfigError
from common.wire.message_fields import Role

Positive = Annotated[float, Meta(gt=0.0, le=1e18)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=0.5)]
Number = Annotated[int, Meta(ge=1, le=10**9)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: an unknown field is refused."""


class PoolSpec(Part, frozen=True):
    """`count` equal workers named `name-0`, `name-1`, ...; their links take `link_rate` bytes a second each way.

    `start_s` is how long a worker takes from its start until it is ready. With 0 `max_step_tokens` is the default of
    its role's setting, as are the others. `slo_tpot_ms` is the setting of decode workers by which they choose their
    batch and chunks, by default the scenario's goal. With `ahead` they launch a step before they have the tokens of
    the one before, as all on CPUs and those with recorded steps on GPUs do.
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
    start_s: Seconds = 30.0
    slo_tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] | None = None
    ahead: bool = True

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or (32 if self.role == "prefill" else 64)

    @property
    def step_tokens(self) -> int:
        return self.max_step_tokens or (512 if self.role == "prefill" else 128)


class ModelSpec(Part, frozen=True):
    """What a token's KV takes, and how long a sequence may be."""

    kv_bytes_per_token: Annotated[int, Meta(ge=1, le=10**9)] = 131_072
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    max_model_len: Number = 131_072


class LoadSpec(Part, frozen=True):
    """Requests of a trace file, or at `rate` a second with lengths of the two ranges.

    `copies` replays a trace so many times at once, each copy with prefixes of its own. `rates` are steps, as pairs of
    a time and the rate from then on; they win over `rate`. With `max_tokens` routers know only this bound of an
    answer's length. Each block id of a trace stands for `id_tokens` tokens.
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


class Goals(Part, frozen=True):
    """Milliseconds; 0: no such goal."""

    ttft_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0
    tpot_ms: Annotated[float, Meta(ge=0.0, le=3.6e6)] = 0.0


class EventSpec(Part, frozen=True):
    """Something that happens to a worker at `at_s`.

    death: its process ends, and connections to it break. With `back_s` another one is started so much later.
    silence: its machine is gone without a word: routers notice by missing heartbeats. `back_s` as above.
    stop: it takes no new requests, and ends once its last one has ended.
    slow: its steps take `factor` times as long from then on.
    start: another worker of the pool `worker` is started, and ready after its pool's `start_s`.
    """

    at_s: Seconds
    kind: Literal["death", "silence", "stop", "slow", "start"]
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

    def check(self) -> None:
        """Checks over several fields. Raises ConfigError."""
        names = [pool.name for pool in self.pool]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("pool.name", name, "a name of its own for each pool")
        if not any(pool.role == "decode" for pool in self.pool):
            raise ConfigError("pool.role", sorted({pool.role for pool in self.pool}), "at least one pool of decode")
        load = self.load
        if bool(load.trace) == bool(load.rate or load.rates):
            raise ConfigError("load.rate", load.rate, "above 0 without a trace, 0 with one")
        if not load.trace and not self.duration_s:
            raise ConfigError("duration_s", self.duration_s, "above 0 without a trace")
        sizes = {f"{pool.name}-{number}" for pool in self.pool for number in range(pool.count)}
        for event in self.event:
            allowed = set(names) if event.kind == "start" else sizes
            if event.worker not in allowed:
                some = ", ".join(sorted(allowed)[:8])
                raise ConfigError("event.worker", event.worker, f"for {event.kind} one of {some}, ...")


def read_scenario(path: Path) -> Scenario:
    """The scenario of a `.toml` or `.json` file. Raises ConfigError."""
    return scenario_of(read_table(path, "scenario"))


def scenario_of(values: Any) -> Scenario:
    """The scenario of decoded TOML or JSON. Raises ConfigError with the field, its value and what is allowed."""
    scenario = converted(values, Scenario, "scenario")
    scenario.check()
    return scenario
