"""Decides which workers should change their role, and when. Pure.

With goals, a forecast predicts how many requests each split of the workers would miss. The policy changes the
workers needed to reach the split that is predicted to miss the fewest, if that saves more than the change costs. The
forecast comes from the planner (`router/planner/split.py`) and is passed in by the dispatcher, which is a layer below.

Without a forecast, or while it shows no problem, measurements decide, one worker at a time. A pool is overloaded while
its load is above 1, and may give away a worker if it would still do well. The gap between the two limits prevents the
opposite change. Either way the load must last, because a change clears a prefix cache and moves streams.

- Load of prefill: the seconds that prompts wait for each other, relative to the allowed wait.
- Load of decode: the maximum of used batch slots, used blocks and, with a goal, time per token; averaged over workers.
- Rejections because of a goal also show an overloaded pool: admission keeps its load at what the goal allows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.cluster import KV_TARGET
from common.latency import StepShape
from common.observe import Ewma
from common.wire import Role
from router.fleet import Worker
from router.policy.forecast import forecast_inputs, model_of, queued_s, rows_of, transfer_s, wait_s


@dataclass(frozen=True, slots=True)
class SplitForecast:
    """Predicted misses by number of prefill workers, including the current number.

    Of the `num_offered` requests of the next `seconds`, and of running answers, `num_missed` would miss a goal. The
    load was estimated from `num_seen` requests and is predicted to last for `lasting_s`. `load` describes it in words.
    """

    num_missed: Mapping[int, float]
    num_offered: float
    seconds: float
    lasting_s: float
    num_seen: int
    load: str


class SplitForecaster(Protocol):
    """Observes requests when they arrive and end, and predicts splits on demand."""

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """Record a new request, whatever its outcome. Its answer may have up to `most_output` tokens."""
        ...

    def turned_away(self, now: float) -> None:
        """Record a request that was rejected before its body was read."""
        ...

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Record a completed request."""
        ...

    def forecast(
        self, workers: Collection[Worker], num_waiting: int, least: int, most: int, now: float
    ) -> SplitForecast | None:
        """Predict the misses of splits with `least` to `most` prefill workers. None without goals or data.

        `workers` are all known workers, ready or not. `num_waiting` requests are on none of them.
        """
        ...


ALLOWED_SHARE, ALLOWED_S = 0.5, 1.0
"""Allowed wait of prompts: a fraction of the goal for first tokens, or without a goal a number of seconds."""
ROOM = 0.8
"""Maximum load of a pool, and maximum busy fraction of prefill workers, without the worker that it gives away."""
IDLE_LOAD = 0.5
"""Prompt wait, as a fraction of the allowed wait, above which prefill gives away no worker."""
LEAST_SPLIT_GAIN = 0.95
"""Decode load must fall at least to this fraction, because steps of few sequences hardly become faster."""
MAX_DRAIN_S = 5.0
"""Workers that would take longer to drain do not change their role, in seconds."""
REFUSED_S = 2.0
"""Time after a rejection during which the responsible pool counts as overloaded, in seconds. At most half of the time
that a pool must be overloaded, so that a single rejection has no effect."""
LEAST_SAVED = 0.1
"""Minimum fraction of requests that a split must save. Predictions have errors, and roles would flap."""
DOUBT = 0.4
"""Additional fraction, divided by the square root of the number of requests from which the load was estimated."""
AS_GOOD = 0.02
"""Splits whose misses differ by a smaller fraction of the requests are equal, and the nearest one is chosen."""
ORDERS_S = 2.0
"""Time within which the orders of one decision must be given, in seconds."""
FORESEEN_S = 60.0
"""Maximum time over which the benefit of a split is counted, in seconds."""
NOTICE_S = 1.0
"""Time until a changed load is detected, in seconds."""
CHANGE_AFTER_S = 3.0
"""Time for which a pool must be overloaded without interruption before a worker changes its role, in seconds."""
CHANGE_INTERVAL_S = 15.0
"""Minimum time between two role changes, in seconds."""
BUSY_SMOOTHING = 0.1
"""Smoothing factor of the busy fraction of prefill workers, observed four times a second."""


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """Limits of role changes.

    `ttft_s`, `tpot_s`: goals, 0 for none. `least`: minimum workers (prefill, decode). A pool must be overloaded for
    `after_s`, and changes are at least `interval_s` apart.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    least: tuple[int, int] = (1, 1)
    after_s: float = CHANGE_AFTER_S
    interval_s: float = CHANGE_INTERVAL_S

    @property
    def allowed_s(self) -> float:
        """Maximum time that a prompt may wait for others, in seconds."""
        return ALLOWED_SHARE * self.ttft_s if self.ttft_s > 0 else ALLOWED_S

    def least_of(self, role: Role) -> int:
        """Return the minimum number of ready workers of `role`; at least one decode worker."""
        prefill, decode = self.least
        return prefill if role == "prefill" else max(1, decode)


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Order for the worker at `address` to become a `role` worker. `reason` contains the numbers."""

    address: str
    role: Role
    reason: str


@dataclass(slots=True)
class RolePolicy:
    """Role decisions of one router. Called at each of its ticks."""

    limits: RoleLimits
    _overloaded: Role | None = None
    _overloaded_since: float = 0.0
    _changed_at: float | None = None
    _busy: Ewma = field(default_factory=lambda: Ewma(BUSY_SMOOTHING, start=0.0))
    _refused_at: dict[Role, float] = field(default_factory=dict)
    _orders: deque[RoleChange] = field(default_factory=deque)
    _decided_at: float = 0.0

    def changed(self, now: float) -> None:
        """Record that a worker changed its role or was ordered to, by this router or another."""
        self._changed_at, self._overloaded = now, None

    def refused(self, role: Role, now: float) -> None:
        """Record a request that was rejected because the pool of `role` would have been too slow."""
        self._refused_at[role] = now

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float, forecast: SplitForecast | None = None
    ) -> RoleChange | None:
        """Return the order to give now, usually None.

        A decision may consist of several orders: call again until it returns None.
        """
        if (order := self._next(prefill, decode, now)) is not None:
            return order
        self._busy.observe(sum(bool(worker.load.num_queued_tokens) for worker in prefill) / max(1, len(prefill)))
        found = self._by_forecast(prefill, decode, forecast, now) if forecast is not None else []
        if not found and (one := self._by_signals(prefill, decode, forecast, now)) is not None:
            found = [one]
        if not found:
            self._overloaded = None
            return None
        role = found[0].role
        if role != self._overloaded:
            self._overloaded, self._overloaded_since = role, now
        rested = self._changed_at is None or now - self._changed_at >= self.limits.interval_s
        if not rested or now - self._overloaded_since < self.limits.after_s:
            return None
        self.changed(now)
        self._orders.extend(found)
        self._decided_at = now
        return self._next(prefill, decode, now)

    # ------------------------------------------------------------ inside

    def _next(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """Return the next order of the last decision whose worker is still in its pool."""
        if now - self._decided_at > ORDERS_S:
            self._orders.clear()
        while self._orders:
            order = self._orders.popleft()
            if any(order.address == worker.address for worker in (decode if order.role == "prefill" else prefill)):
                return order
        return None

    def _by_forecast(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], forecast: SplitForecast, now: float
    ) -> list[RoleChange]:
        """Return the orders towards the split with the fewest misses, as far as workers can change; usually none."""
        missed, present, num = forecast.num_missed, len(prefill), len(prefill) + len(decode)
        if present not in missed:
            return []  # workers have joined or left since
        enough = min(missed.values()) + AS_GOOD * forecast.num_offered
        best = min((one for one in missed if missed[one] <= enough), key=lambda one: abs(one - present))
        if best == present:
            return []
        role: Role = "prefill" if best > present else "decode"
        least = self.limits.least_of("decode" if role == "prefill" else "prefill")
        pool = decode if role == "prefill" else prefill
        donors = _donors(pool, role, min(abs(best - present), len(pool) - least), now)
        after = present + (len(donors) if role == "prefill" else -len(donors))
        if not donors or not _is_worthwhile(
            forecast, self.limits, present, after, num, [drain_of(one, now) for one in donors]
        ):
            return []
        reason = (
            f"{forecast.load}: in {forecast.seconds:.0f} s {missed[present]:.1f} of {forecast.num_offered:.1f} requests"
            f" would miss a goal with {present} prefill and {num - present} decode workers, "
            f"{_missed_at(forecast, after):.1f} with {after} and {num - after}"
        )
        return [RoleChange(worker.address, role, f"{reason}; drain {drain_of(worker, now):.2f} s") for worker in donors]

    def _by_signals(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], forecast: SplitForecast | None, now: float
    ) -> RoleChange | None:
        """Return an order for the pool that is measured to be overloaded, if any."""
        found = self._to_prefill(prefill, decode, now) or self._to_decode(prefill, decode, now)
        if found is None or forecast is None:
            return found
        present, missed = len(prefill), forecast.num_missed
        after = present + (1 if found.role == "prefill" else -1)
        if present not in missed or after not in missed:
            return None
        return found if missed[after] <= missed[present] + AS_GOOD * forecast.num_offered else None

    def _to_prefill(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """Return an order for a decode worker, if prompts wait too long and decode does well with one worker less."""
        waits_s, refuses = mean_wait_s(prefill or decode, now), self._refuses("prefill", now)
        num_left = len(decode) - 1
        if (waits_s <= self.limits.allowed_s and not refuses) or num_left < self.limits.least_of("decode"):
            return None
        then = decode_load(decode, len(decode) / num_left, self.limits.tpot_s)
        if then > ROOM or (donor := _donor(decode, "prefill", now)) is None:
            return None
        drain_s = drain_of(donor, now)
        if drain_s >= waits_s and not refuses:
            return None  # the prompts will be computed before the worker is drained
        return RoleChange(
            donor.address,
            "prefill",
            f"prompts wait {waits_s:.2f} s on {len(prefill)} prefill workers, the limit is "
            f"{self.limits.allowed_s:.2f} s{_rejections(refuses)}; decode load would be {then:.2f} with {num_left} of "
            f"{len(decode)} workers; drain {drain_s:.2f} s",
        )

    def _to_decode(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """Return an order for a prefill worker, if decode is full and prefill does well with one worker less."""
        num_left = len(prefill) - 1
        if not decode or num_left < self.limits.least_of("prefill"):
            return None
        load, refuses = decode_load(decode, 1.0, self.limits.tpot_s), self._refuses("decode", now)
        if load <= 1.0 and not refuses:
            return None
        then = decode_load(decode, len(decode) / (len(decode) + 1), self.limits.tpot_s)
        busy = self._busy.value * len(prefill) / max(0.5, num_left)
        waits_s = mean_wait_s(prefill, now)
        if then > LEAST_SPLIT_GAIN * load or busy > ROOM or waits_s > IDLE_LOAD * self.limits.allowed_s:
            return None
        if (donor := _donor(prefill, "decode", now)) is None:
            return None
        return RoleChange(
            donor.address,
            "decode",
            f"decode load is {load:.2f} with {len(decode)} workers{_rejections(refuses)}, and would be {then:.2f} with "
            f"one more; prefill would be busy for {busy:.2f} of the time with {num_left} of {len(prefill)} workers; "
            f"drain {drain_of(donor, now):.2f} s",
        )

    def _refuses(self, role: Role, now: float) -> bool:
        return now - self._refused_at.get(role, -math.inf) <= min(REFUSED_S, self.limits.after_s / 2)


def mean_wait_s(workers: Sequence[Worker], now: float) -> float:
    """Return the mean wait of a prompt over the workers in seconds; 0 without workers."""
    return sum(wait_s(worker, now) for worker in workers) / len(workers) if workers else 0.0


def decode_load(workers: Sequence[Worker], share: float, tpot_s: float) -> float:
    """Return the mean load of decode workers if each had `share` times its requests; 1 is full."""
    return sum(_load_of(worker, share, tpot_s) for worker in workers) / len(workers) if workers else 0.0


def _rejections(refuses: bool) -> str:
    """Format rejections for a reason."""
    return ", requests are rejected" if refuses else ""


def drain_of(worker: Worker, now: float) -> float:
    """Return the seconds until the worker is drained: prompts are computed, streams move to other workers."""
    if worker.role == "prefill":
        return wait_s(worker, now)
    rows = rows_of(worker)
    each_s = transfer_s(forecast_inputs(worker), rows.context // rows.num_rows) if rows.num_rows else 0.0
    return queued_s(worker, now) + rows.num_rows * each_s


def _load_of(worker: Worker, share: float, tpot_s: float) -> float:
    hello, rows = worker.identity, rows_of(worker)
    places = worker.load.num_requests / max(1, hello.max_num_seqs)
    # Cached blocks count as free. Requests in transit count with their booked blocks.
    blocks = (hello.num_blocks - worker.load.num_available_blocks) / max(1, hello.num_blocks) / KV_TARGET
    load = share * max(places, blocks)
    model = model_of(worker)
    # A goal that a single sequence misses is ignored: no number of workers would meet it.
    if tpot_s > 0 and rows.num_rows and model.seconds(StepShape.of_rows(1, rows.context // rows.num_rows)) <= tpot_s:
        shared = StepShape.of_rows(round(share * rows.num_rows), round(share * rows.context))
        load = max(load, model.seconds(shared) / tpot_s)
    return load


def _missed_at(forecast: SplitForecast, num_prefill: int) -> float:
    """Return the misses of a split, or of the nearest one that was evaluated."""
    return forecast.num_missed[min(forecast.num_missed, key=lambda one: abs(one - num_prefill))]


def _is_worthwhile(
    forecast: SplitForecast, limits: RoleLimits, present: int, after: int, num: int, drains_s: Sequence[float]
) -> bool:
    """Return whether a change saves more requests than are lost while its workers drain. `num` workers share the load.

    It helps until the load changes, and does harm from then until that is detected and the workers have changed back.
    """
    saved = (forecast.num_missed[present] - _missed_at(forecast, after)) / forecast.seconds
    rate = forecast.num_offered / forecast.seconds
    if saved < (LEAST_SAVED + DOUBT / math.sqrt(max(1, forecast.num_seen))) * rate:
        return False
    helps_s = min(FORESEEN_S, forecast.lasting_s) - limits.after_s - NOTICE_S - 2 * max(drains_s)
    return saved * helps_s > rate * sum(drains_s) / num


def _donor(workers: Sequence[Worker], role: Role, now: float) -> Worker | None:
    """Return the first worker to give to the other pool."""
    return next(iter(_donors(workers, role, 1, now)), None)


def _donors(workers: Sequence[Worker], role: Role, num: int, now: float) -> list[Worker]:
    """Return up to `num` workers for the other pool: those that return to their home role first, then by drain time.

    Streams and KV need another worker of the same layout, so the last one of a layout stays, unless its pool is left
    empty.
    """
    layouts = Counter(worker.identity.fingerprint for worker in workers)
    able = [
        worker
        for worker in workers
        if worker.identity.changes_role and not worker.life.suspect and drain_of(worker, now) <= MAX_DRAIN_S
    ]
    found: list[Worker] = []
    for worker in sorted(able, key=lambda worker: (worker.home != role, drain_of(worker, now), worker.address)):
        layout = worker.identity.fingerprint
        if len(found) < num and (layouts[layout] > 1 or len(workers) - len(found) == 1):
            found.append(worker)
            layouts[layout] -= 1
    return found
