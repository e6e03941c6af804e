"""Predicts the goals that a split of the present workers into prefill and decode would miss in the next seconds. Pure.

The fraction of the load that a number of workers can serve within the goals is the planner's own criterion
(`sizing.py`). In addition it considers present work: queued prompts, and running answers that other decode workers
would take over.

    prompts started in time   what the pool can serve, plus the queue that still meets the goal, minus the present queue
    answers admitted          what the pool can serve, but none while more answers run than it can hold
    running answers missed    answers whose mean time per token, past and future, would miss the goal

`SizingForecaster` predicts this for the dispatcher from load, pools and goals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import msgspec

from common.config import RouterConfig
from common.wire import ROLES, Role
from router.fleet import Worker
from router.planner.forecast import error_margin, of_prompts, packed_s
from router.planner.loop import goals_of
from router.planner.offered_load import OfferedLoad
from router.planner.planner import lost
from router.planner.pool import Fleet, Goals, PoolObserver, PoolState, WorkerKind
from router.planner.recent_load import RecentLoad
from router.planner.sizing import decode_share, parts, prefill_share
from router.policy import CHANGE_INTERVAL_S, UNTRIED_PREFILL_SLOWDOWN, SplitForecast, queued_s, rows_of

LEAST_ROOM_S = 1.0
"""Allowed wait of prompts without a goal for first tokens, or with one that prompts miss by themselves, in seconds."""
ALONE_RISK = 0.15
"""Fraction of the requests that an empty prefill pool counts as missed: new long prompts would stall the answers of
decode workers until a worker has changed its role."""
NUM_PARTS = 10
"""Number of classes of running answers by remaining fraction: 1/20, 3/20, ..."""


@dataclass(frozen=True, slots=True)
class PresentWork:
    """Present work: prompts that take one prefill worker `waiting_s`, and running answers on `num_decode` workers.

    An answer has `context` tokens on average, and `tokens_left` to generate. On average it is half done.
    """

    waiting_s: float = 0.0
    num_answers: float = 0.0
    context: float = 0.0
    tokens_left: float = 0.0
    num_decode: int = 1


@dataclass(frozen=True, slots=True)
class SplitEvaluator:
    """Evaluates splits of `fleet` over the next `seconds` of `load`."""

    load: OfferedLoad
    fleet: Fleet
    goals: Goals
    running: PresentWork
    seconds: float

    def num_missed(self, num_prefill: int, num_decode: int) -> float:
        """Return the requests that would miss a goal with these numbers of workers, including running answers."""
        alone: Mapping[Role, PoolState] = {"decode": self.fleet.pools["decode"]}
        remote, local = parts(self.load, self.fleet if num_prefill else replace(self.fleet, pools=alone))
        decode = self._decode_share(local, num_decode)
        met = local.rate * decode
        if remote.rate > 0.0:
            met += remote.rate * min(decode, self._prefill_share(remote, num_prefill))
        risk = 0.0 if num_prefill else ALONE_RISK * self.load.rate
        return (max(0.0, self.load.rate - met) + risk) * self.seconds + self._late_answers(num_decode)

    # ------------------------------------------------------------ inside

    @property
    def _kind(self) -> WorkerKind:
        """Properties of a decode worker. One without computed prompts is assumed to be slower than a prefill worker."""
        kind, like = self.fleet.pools["decode"].kind, self.fleet.pools["prefill"].kind.model
        if kind.model.knows_prompts:
            return kind
        token_s, pair_s = UNTRIED_PREFILL_SLOWDOWN * like.token_s, UNTRIED_PREFILL_SLOWDOWN * like.pair_s
        return replace(kind, model=msgspec.structs.replace(kind.model, token_s=token_s, pair_s=pair_s))

    def _prefill_share(self, remote: OfferedLoad, num_prefill: int) -> float:
        """Return the fraction of new prompts that `num_prefill` workers start in time."""
        kind = self.fleet.pools["prefill"].kind
        kept = prefill_share(remote, kind, self.goals, num_prefill)
        own_s = of_prompts(remote, kind, 1).own_s
        mean_s = sum(own_s) / len(own_s)
        room_s = max(LEAST_ROOM_S, self.goals.ttft_s - mean_s)
        num_more = (num_prefill * room_s - self.running.waiting_s) / mean_s
        return min(1.0, max(0.0, kept + num_more / (remote.rate * self.seconds)))

    def _decode_share(self, local: OfferedLoad, num_decode: int) -> float:
        """Return the fraction of new answers for which `num_decode` workers have capacity in time."""
        kind, running = self._kind, self.running
        kept = decode_share(self.load, local, kind, self.goals, num_decode)
        room = num_decode * self._most_rows(kind)
        if running.num_answers <= room or not kept:
            return kept
        rows = running.num_answers / num_decode
        last_s = 2.0 * running.tokens_left * self._step_s(kind, rows / 2)  # the longest has twice the mean remainder
        full_s = last_s * (1.0 - room / running.num_answers)
        return kept * max(0.0, 1.0 - full_s / self.seconds)

    def _most_rows(self, kind: WorkerKind) -> float:
        """Return the maximum batch size of a worker within the goal for tokens."""
        most, context = float(kind.max_num_seqs), self.running.context
        if context > 0.0:
            most = min(most, kind.num_blocks * kind.block_size / kind.num_kept(context))
        if self.goals.tpot_s > 0.0:
            most = min(most, kind.model.most_rows(context, self.goals.tpot_s / error_margin(kind)))
        return max(1.0, most)

    def _step_s(self, kind: WorkerKind, num_rows: float) -> float:
        """Return the mean time per token in a batch of `num_rows`."""
        model = kind.model
        row_s = model.row_s + model.context_s * self.running.context
        return error_margin(kind) * (model.fixed_s + model.floor_s + row_s * max(1.0, num_rows))

    def _late_answers(self, num_decode: int) -> float:
        """Return the running answers that miss the goal for tokens if `num_decode` workers complete them.

        An answer with the fraction u remaining ran in the full batch until now. From now on the batch shrinks: after
        the fraction v of an answer, 1 - v of the batch is left.
        """
        running, goal_s, kind = self.running, self.goals.tpot_s, self._kind
        if goal_s <= 0.0 or not running.num_answers:
            return 0.0
        before_s = self._step_s(kind, running.num_answers / max(1, running.num_decode))
        num_late = 0
        for part in range(NUM_PARTS):
            left = (part + 0.5) / NUM_PARTS
            then_s = self._step_s(kind, running.num_answers / num_decode * (1.0 - left / 2))
            num_late += (1.0 - left) * before_s + left * then_s > goal_s
        return running.num_answers * num_late / NUM_PARTS


LEAST_HORIZON_S = 10.0
"""Minimum prediction horizon in seconds. Also at least until the next role change is allowed."""
NUM_CANDIDATES = 8
"""Number of evenly spaced splits that are evaluated in a large fleet, in addition to the neighbours of the present
one."""


class SizingForecaster:
    """Forecaster of role splits for a router with goals. Not thread-safe: owned by the router's event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._goals, self._threshold = goals_of(config), config.local_prefill_threshold
        self._horizon_s = max(LEAST_HORIZON_S, CHANGE_INTERVAL_S)
        self._observer, self._load = PoolObserver(ROLES), RecentLoad()

    @classmethod
    def of(cls, config: RouterConfig) -> SizingForecaster | None:
        """Create from the configuration; None if roles are fixed or there are no goals."""
        has_goals = config.slo_ttft_ms > 0 or config.slo_tpot_ms > 0
        return cls(config) if config.role_change and has_goals else None

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """See `SplitForecaster`."""
        self._load.arrived(num_prompt, num_cached, most_output, now)

    def turned_away(self, now: float) -> None:
        self._load.turned_away(now)

    def ended(self, num_prompt: int, num_output: int) -> None:
        self._load.ended(num_prompt, num_output)

    def forecast(
        self, workers: Collection[Worker], num_waiting: int, least: int, most: int, now: float
    ) -> SplitForecast | None:
        pools = self._observer.observe(workers, {}, now)
        times = self._observer.num_routers(workers)
        own = self._load.offered(now)
        fleet = Fleet(pools, self._threshold)
        if own is None or lost(fleet) or not all(pool.kind.is_known for pool in pools.values()):
            return None
        load = own.at(own.rate * times)
        present, num = pools["prefill"].num_ready, pools["prefill"].num_ready + pools["decode"].num_ready
        running = _running(workers, pools, num_waiting * times, load, now)
        splits = SplitEvaluator(load, fleet, self._goals, running, self._horizon_s)
        missed = {one: splits.num_missed(one, num - one) for one in _candidates(least, most, present, num)}
        return SplitForecast(
            num_missed=missed,
            num_offered=load.rate * self._horizon_s,
            seconds=self._horizon_s,
            lasting_s=self._load.lasting_s(now),
            num_seen=self._load.num_seen,
            load=_described(load),
        )


def _candidates(least: int, most: int, present: int, num: int) -> list[int]:
    """Return the numbers of prefill workers to evaluate: the present one, its neighbours, and evenly spaced ones."""
    steps = {least + (most - least) * step // NUM_CANDIDATES for step in range(NUM_CANDIDATES + 1)}
    near = {present - 1, present + 1}
    within = {one for one in steps | near if max(0, least) <= one <= min(num - 1, most)}
    return sorted(within | {present})


def _running(
    workers: Collection[Worker], pools: dict[Role, PoolState], num_waiting: float, load: OfferedLoad, now: float
) -> PresentWork:
    """Return the present work on ready workers. `num_waiting` requests are on none."""
    kind = pools["prefill"].kind
    mean_s = sum(packed_s(kind, one) for one in load.requests) / len(load.requests)
    ready = [worker for worker in workers if worker.ready]
    decode = [worker for worker in ready if worker.role == "decode"]
    rows = [rows_of(worker) for worker in decode]
    num_answers = sum(one.num_rows for one in rows)
    num_booked = sum(worker.bookings.total.num_requests for worker in decode)
    tokens_left = sum(worker.bookings.total.num_more * worker.identity.block_size for worker in decode)
    return PresentWork(
        waiting_s=sum(queued_s(worker, now) for worker in ready if worker.role == "prefill") + num_waiting * mean_s,
        num_answers=num_answers,
        context=sum(one.context for one in rows) / num_answers if num_answers else 0.0,
        tokens_left=tokens_left / num_booked if num_booked else 0.0,
        num_decode=len(decode),
    )


def _described(load: OfferedLoad) -> str:
    num = len(load.requests)
    prompt = sum(one.num_uncached for one in load.requests) / num
    output = sum(one.num_output for one in load.requests) / num
    return f"{load.rate:.3g} requests/s of {prompt:.0f} uncached and {output:.0f} answer tokens"
