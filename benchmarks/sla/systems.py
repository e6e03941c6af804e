"""Systems that are compared on one load: Diptych, rules that choose workers in its place, and whole plain systems.

- `choice`: a plain rule chooses the workers. All else is Diptych's: what it refuses, the order of prompts, batches that
  goals cap, which prompts decode workers compute.
- `whole`: the same rule in a plain system. Its routers know no goals and no times of steps, so they predict, hold and
  refuse nothing but what exceeds a bound of requests in flight. Prompts are computed on prefill workers alone, first
  come first served; decode workers fill their batches. The bound is as good as an operator can know it: the rate that
  the pools serve, times the longest that a request may take within its goals (Little's law).
- `before`: what Diptych did before it predicted times. Its refusals by predicted waits are better here than they were.
- `whole: one pool`: the plain system without prefill workers, least loaded; each step has a chunk of prompts that an
  operator has set to fit the goal for a token.
- `one pool`: Diptych on as many workers that all compute prompts and answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from benchmarks.load.trace import TraceRow
from benchmarks.simulator.world.scenario import Scenario, scenario_of
from benchmarks.sla.loads import CACHE_TOKENS, DECODE, PLANNED_SHARE, PREFILL, SLOW, STEP_TOKENS, Load

Kind = Literal["ours", "choice", "whole", "before", "one pool"]
RULES: Final = ("random", "round-robin", "least-loaded", "prefix-only")


@dataclass(frozen=True, slots=True)
class System:
    """`policy` is a value of `--routing-policy`."""

    policy: str
    kind: Kind
    is_pooled: bool = False

    @property
    def name(self) -> str:
        if self.kind == "whole" and self.is_pooled:
            return "whole: one pool"
        return f"{self.kind}: {self.policy}" if self.kind in ("choice", "whole") else self.kind


OURS: Final = System("diptych", "ours")
ONE_POOL: Final = System("diptych", "one pool", is_pooled=True)
BEFORE: Final = System("benchmarks.sla.by_tokens:ByTokens", "before")
CHOICES: Final = tuple(System(rule, "choice") for rule in RULES)
PLAIN_POOL: Final = System("least-loaded", "whole", is_pooled=True)
WHOLES: Final = (*(System(rule, "whole") for rule in RULES), PLAIN_POOL)
SYSTEMS: Final = (OURS, *CHOICES, *WHOLES, BEFORE, ONE_POOL)


def systems_on(load: Load) -> Sequence[System]:
    """The systems that differ on a load: prefix only is round robin where no prompts share a prefix."""
    shares_prefixes = any(row.block_ids for row in load.rows)
    return [system for system in SYSTEMS if shares_prefixes or system.policy != "prefix-only"]


def most_in_flight(rows: Sequence[TraceRow], load: Load, served: float) -> int:
    """Requests that a plain system takes at once, where its pools serve `served` a second."""
    answer_s = load.tpot_ms / 1000 * statistics.fmean(row.output_len for row in rows)
    return math.ceil(served * (load.ttft_ms / 1000 + answer_s))


def scenario(load: Load, trace: Path, system: System, speedup: float, seed: int, in_flight: int = 0) -> Scenario:
    """The run of one system on a trace file; `in_flight` bounds a plain one."""
    is_plain = system.kind == "whole"
    values: dict[str, Any] = {
        "seed": seed,
        "policy": system.policy,
        "goals": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms},
        "model": {"block_size": load.block_size},
        "load": {"trace": str(trace), "speedup": speedup, "jitter_s": load.jitter_s / speedup},
        "pool": _pools(load, system),
    }
    if is_plain:
        unjudged = {"slo_ttft_ms": 0, "slo_tpot_ms": 0, "local_prefill_threshold": 0}
        values |= {"settings": unjudged | {"max_inflight": in_flight}, "reports_steps": False}
    else:  # as a plain system is bounded, too
        values |= {"settings": {"slo_refuse": "predicted"} | ({"slo_tpot_ms": 0} if system.kind == "before" else {})}
    if system.kind in ("whole", "before"):
        values |= {"prompt_order": "first-come"}
    return scenario_of(values)


def plain_chunk(load: Load) -> int:
    """Prompt tokens of a step that takes about `PLANNED_SHARE` of the goal for a token."""
    return int((PLANNED_SHARE * load.tpot_ms / 1000 - DECODE.fixed_s) / DECODE.token_s)


def _pools(load: Load, system: System) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {
        "num_blocks": CACHE_TOKENS // load.block_size,
        "max_num_seqs": load.most_rows,
        "max_step_tokens": STEP_TOKENS,
    }
    decode = shared | {"role": "decode", "coefficients": msgspec.to_builtins(DECODE)}
    if system.kind in ("whole", "before"):
        decode |= {"slo_tpot_ms": 0.0, "max_step_tokens": plain_chunk(load)}
    num_fast = load.num_prefill - load.num_slow
    if system.is_pooled:
        wanted = [("d", load.num_decode + num_fast, decode), ("slow", load.num_slow, _slowed(decode))]
    else:
        prefill = shared | {"role": "prefill", "coefficients": msgspec.to_builtins(PREFILL)}
        wanted = [("p", num_fast, prefill), ("slow", load.num_slow, _slowed(prefill)), ("d", load.num_decode, decode)]
    return [{"name": name, "count": count} | pool for name, count, pool in wanted]


def _slowed(pool: dict[str, Any]) -> dict[str, Any]:
    return pool | {"coefficients": {name: SLOW * seconds for name, seconds in _times(pool["coefficients"])}}


def _times(coefficients: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in coefficients.items() if name.endswith("_s")]
