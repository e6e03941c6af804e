"""Predicts for the dispatcher what each division of the present workers would miss: load, pools and goals in one."""

from __future__ import annotations

from collections.abc import Collection

from common.config import RouterConfig
from common.wire import ROLES, Role
from router.fleet import Worker
from router.planner.forecast import packed_s
from router.planner.loop import goals_of
from router.planner.offered_load import OfferedLoad
from router.planner.planner import lost
from router.planner.pool import Fleet, PoolState
from router.planner.pool_observer import PoolObserver
from router.planner.recent_load import RecentLoad
from router.planner.split import Splits, UnderWay
from router.policy import CHANGE_INTERVAL_S, SplitForecast, queued_s, rows_of

LEAST_HORIZON_S = 10.0
"""What the next seconds bring counts: at least so many, and until the next change is allowed."""
NUM_CANDIDATES = 8
"""Of many workers, so many evenly spaced splits are judged, and the neighbours of the present one."""


class SizingForecaster:
    """Owned by the router's event loop. A router with goals; without them `of` gives none."""

    def __init__(self, config: RouterConfig) -> None:
        self._goals, self._threshold = goals_of(config), config.local_prefill_threshold
        self._horizon_s = max(LEAST_HORIZON_S, CHANGE_INTERVAL_S)
        self._observer, self._load = PoolObserver(ROLES), RecentLoad()

    @classmethod
    def of(cls, config: RouterConfig) -> SizingForecaster | None:
        """The one that a router's settings describe; None where roles are pinned, or nothing is to be met."""
        has_goals = config.slo_ttft_ms > 0 or config.slo_tpot_ms > 0
        return cls(config) if config.role_change and has_goals else None

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """See the protocol in `router/policy/split.py`; as for the others."""
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
        splits = Splits(load, fleet, self._goals, running, self._horizon_s)
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
    """Numbers of prefill workers to judge: the present one, its neighbours, and some between the bounds."""
    steps = {least + (most - least) * step // NUM_CANDIDATES for step in range(NUM_CANDIDATES + 1)}
    near = {present - 1, present + 1}
    within = {one for one in steps | near if max(0, least) <= one <= min(num - 1, most)}
    return sorted(within | {present})


def _running(
    workers: Collection[Worker], pools: dict[Role, PoolState], num_waiting: float, load: OfferedLoad, now: float
) -> UnderWay:
    """Work under way on ready workers. `num_waiting` requests are on none."""
    kind = pools["prefill"].kind
    mean_s = sum(packed_s(kind, one) for one in load.requests) / len(load.requests)
    ready = [worker for worker in workers if worker.ready]
    decode = [worker for worker in ready if worker.role == "decode"]
    rows = [rows_of(worker) for worker in decode]
    num_answers = sum(one.num_rows for one in rows)
    num_booked = sum(worker.booked.num_requests for worker in decode)
    tokens_left = sum(worker.booked.num_more * worker.identity.block_size for worker in decode)
    return UnderWay(
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
