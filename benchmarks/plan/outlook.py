"""What formulas say before anything is simulated: which pools cannot hold the load, and how near others come. Pure.

The bounds are strict: they count the cheapest share of the requests that may meet the goals, full steps, and prompts
where they take the least. The forecasts are those of the router's planner (docs/guides/goals.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.plan.candidate import Candidate, Flags, base_flags, scenario
from benchmarks.plan.spec import PlanSpec, WorkerSpec
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.simulator.world.load import SimulatedRequest
from common.latency.step_model import StepShape
from common.wire.message_fields import Role
from router.planner.forecast import of_decode, of_prompts
from router.planner.offered_load import OfferedLoad, SampledRequest
from router.planner.pool import Fleet, Goals, PoolState, WorkerKind
from router.planner.sizing import parts, predict

SAMPLE = 256
WINDOW_S = 10.0
"""The rate that a request sees is that of such a window."""
MOST_BURSTINESS = 20.0
OVERLOADED = 100.0
"""Stands for a tail without end."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one request takes at least, in seconds: its prompt on either kind of worker, and its rows in decode steps.

    `held`: its KV in tokens times seconds.
    """

    on_prefill_s: float
    on_decode_s: float
    rows_s: float
    num_rows: int
    held: float


class Outlook:
    """Of one load. Raises ConfigError and TraceError for a load that cannot be simulated."""

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        lone = scenario(spec, Candidate(0, 1, base_flags(spec)), spec.seed, load_factor=1.0, goals=spec.goals)
        requests = Simulation(lone).requests
        self.num_requests = len(requests)
        self.seconds = spec.arrivals_s or max(1.0, requests[-1].arrival_s)
        self._sampled = sampled(requests)
        self._times = [request.arrival_s for request in requests]

    # ------------------------------------------------------------ what cannot be

    def can_hold(self, candidate: Candidate) -> bool:
        """False when the goals are out of reach because the workers have too little time or memory."""
        goals, flags = self.spec.goals, candidate.flags
        if not (goals.ttft_ms and goals.tpot_ms):
            return True  # requests that may wait without end need no time
        longest = max(one.num_output for one in self._sampled)
        time_s = self.seconds + (goals.ttft_ms + longest * goals.tpot_ms) / 1e3
        works = [self._work(one, flags) for one in self._sampled]
        num, count = math.floor(goals.quantile * len(works)), candidate.num_decode
        each = self.num_requests / len(works)  # requests that a sampled one stands for

        def least(costs: Iterable[float]) -> float:
            return each * sum(sorted(costs)[:num])

        room = self.spec.decode.num_blocks * self.spec.model.block_size
        if least(one.held for one in works) > count * room * time_s:
            return False
        fixed_s, goal_s = self.spec.decode.coefficients.fixed_s, goals.tpot_ms / 1e3
        # A step takes its fixed time and that of its rows. Rows may take what the goal leaves, and are so many at most.
        slowdown = goal_s / (goal_s - fixed_s) if goal_s > fixed_s else 1.0
        num_steps = least(one.num_rows for one in works) / flags.max_num_seqs
        rows_s = least(one.rows_s for one in works)
        decode_s = max(slowdown * rows_s, num_steps * fixed_s + rows_s)
        prompts = (
            (one.on_decode_s,) if candidate.is_one_pool else (one.on_prefill_s, one.on_decode_s) for one in works
        )
        both_s = least(slowdown * one.rows_s + min(of) for one, of in zip(works, prompts, strict=True))
        return decode_s <= count * time_s and both_s <= (count + candidate.num_prefill) * time_s

    def _work(self, one: SampledRequest, flags: Flags) -> Work:
        first, then = self.spec.prefill.coefficients, self.spec.decode.coefficients
        context, num_rows = one.num_prompt + one.num_output / 2, max(0, one.num_output - 1)
        steps = one.num_uncached / max(1, flags.max_num_batched_tokens)
        kept = min(context, self.spec.model.window or context)
        return Work(
            on_prefill_s=steps * first.fixed_s + _prompt_s(first, one.prompt),
            on_decode_s=_prompt_s(then, one.prompt),
            rows_s=num_rows * (then.row_s + then.context_s * context),
            num_rows=num_rows,
            held=num_rows * kept * (then.fixed_s + then.row_s + then.context_s * one.num_prompt),
        )

    # ------------------------------------------------------------ what is likely

    def strain(self, candidate: Candidate) -> float:
        """How far predicted tails exceed the goals, as the largest ratio: at most 1 where both are met."""
        fleet, goals = self._fleet(candidate), self._goals
        found = predict(self.offered, fleet, self._numbers(candidate), goals)
        ratios = [
            value / goal for value, goal in ((found.ttft_s, goals.ttft_s), (found.tpot_s, goals.tpot_s)) if goal > 0.0
        ]
        return min(OVERLOADED, max([*ratios, *(share / 0.95 for share in self.used(candidate).values())]))

    def used(self, candidate: Candidate) -> dict[str, float]:
        """The predicted share of each resource that the mean load uses, by what it is called."""
        fleet, load = self._fleet(candidate), self.offered.at(self.num_requests / self.seconds)
        remote, local = parts(load, fleet) if candidate.num_prefill else load.split(1 << 60)
        found = of_decode(load, local, fleet.pools["decode"].kind, candidate.num_decode, 0.5)
        places = found.num_rows / candidate.flags.max_num_seqs
        shares = {"decode time": found.used, "KV blocks": found.blocks, "places": places}
        if candidate.num_prefill:
            prompts = of_prompts(remote, fleet.pools["prefill"].kind, candidate.num_prefill)
            shares["prefill time"] = prompts.used
            num_bytes = remote.rate * _mean_uncached(remote.requests) * self.spec.model.kv_bytes_per_token
            pools = ((self.spec.prefill, candidate.num_prefill), (self.spec.decode, candidate.num_decode))
            shares["transfer"] = num_bytes / min(worker.link_rate * count for worker, count in pools)
        return {name: min(OVERLOADED, share) for name, share in shares.items()}

    def binding(self, candidate: Candidate) -> str:
        """The resource that is used most, and how much of it."""
        name, share = max(self.used(candidate).items(), key=lambda item: item[1])
        return f"{name} {share:.0%}" if share < OVERLOADED else f"{name}: too little"

    @property
    def best_ttft_ms(self) -> float:
        """The goal's quantile of first tokens without any wait, on the faster kind of worker."""
        quantile, flags = self.spec.goals.quantile, base_flags(self.spec)
        pools = self._fleet(Candidate(1, 1, flags)).pools
        kinds = [pool.kind for pool in pools.values() if pool.kind.model.knows_prompts]
        return min(of_prompts(self.offered, kind, 1).best_s(quantile) for kind in kinds) * 1e3

    @property
    def best_tpot_ms(self) -> float:
        """The time of a token in a batch of one."""
        kind = self._fleet(Candidate(1, 1, base_flags(self.spec))).pools["decode"].kind
        return of_decode(self.offered.at(1e-9), self.offered.at(0.0), kind, 1, self.spec.goals.quantile).lone_s * 1e3

    @cached_property
    def offered(self) -> OfferedLoad:
        """The load as the planner sees it: at the rate in whose company the mean request comes."""
        counts = Counter(int(at_s / WINDOW_S) for at_s in self._times)
        num_windows = max(1, round(self.seconds / WINDOW_S))
        mean = self.num_requests / num_windows
        variance = sum((counts[window] - mean) ** 2 for window in range(num_windows)) / num_windows
        rate = sum(count**2 for count in counts.values()) / self.num_requests / WINDOW_S
        rate = max(self.num_requests / self.seconds, rate - 1.0 / WINDOW_S)  # the request itself is no company
        burstiness = 1.0 if rate * WINDOW_S < 2 else min(MOST_BURSTINESS, max(1.0, variance / mean / 2))
        return OfferedLoad(rate=rate, rate_ahead=rate, burstiness=burstiness, requests=self._sampled)

    @property
    def _goals(self) -> Goals:
        goals = self.spec.goals
        return Goals(goals.ttft_ms / 1e3, goals.tpot_ms / 1e3, goals.quantile)

    def _fleet(self, candidate: Candidate) -> Fleet:
        flags, spec = candidate.flags, self.spec
        decode = _kind(spec, spec.decode, flags.max_num_seqs, flags.local_prefill_chunk)
        pools: dict[Role, PoolState] = {"decode": PoolState(decode)}
        if candidate.num_prefill:
            pools["prefill"] = PoolState(_kind(spec, spec.prefill, 1, flags.max_num_batched_tokens))
        return Fleet(pools, flags.local_prefill_threshold)

    @staticmethod
    def _numbers(candidate: Candidate) -> dict[Role, int]:
        return {"prefill": candidate.num_prefill, "decode": candidate.num_decode}


def _prompt_s(coefficients: StepCoefficients, shape: StepShape) -> float:
    return coefficients.token_s * shape.num_tokens + coefficients.pair_s * shape.num_pairs


def _mean_uncached(requests: Sequence[SampledRequest]) -> float:
    """Return the mean number of prompt tokens to compute and send; 0 without requests."""
    return sum(one.num_uncached for one in requests) / len(requests) if requests else 0.0


def _kind(spec: PlanSpec, worker: WorkerSpec, max_num_seqs: int, step_tokens: int) -> WorkerKind:
    size, window = spec.model.block_size, spec.model.window
    return WorkerKind(worker.coefficients.model(), worker.num_blocks, size, max_num_seqs, step_tokens, window)


def sampled(requests: Sequence[SimulatedRequest]) -> tuple[SampledRequest, ...]:
    """Every n-th request, with the prompt tokens that a cache which forgets nothing would hold."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = []
    every = max(1, len(requests) // SAMPLE)
    for number, request in enumerate(requests):
        content = request.content
        num_known = 0
        for num in range(1, len(content.ids) + 1):
            prefix = (content.copy, content.ids[:num])
            if prefix in seen:
                num_known = num
            seen.add(prefix)
        if number % every == 0:
            num_cached = min(num_known * content.id_tokens, content.num_prompt_tokens - 1)
            found.append(SampledRequest(content.num_prompt_tokens, num_cached, request.output_len))
    return tuple(found)
