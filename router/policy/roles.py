"""Which workers should change their role, and when. Pure: `now` comes in, orders or none come out.

With goals, a forecast has what each split of the workers would miss. The policy moves to the split that is predicted to
miss least, by as many workers at once as that takes, if it saves more than the change costs. The planner makes the
forecast (`router/planner/split.py`). The dispatcher is a layer below the planner and only gets its results.

Without a forecast, or while it sees nothing amiss, what is measured decides, one worker at a time. A pool is behind
while its load is above 1, and may give a worker while it would do well without it. In between lies a gap, so a change
never justifies the opposite one. Either way it takes a load that lasts, for a change empties a prefix cache and moves
streams; a load that swings faster than that changes nothing.

- Load of prefill: the seconds that prompts wait for each other, over those allowed.
- Load of decode: the fullest of places, blocks and, where there is a goal, time of a token; the mean over its workers.
- Requests that are refused for a goal show a pool behind as well: admission keeps its load at what the goal allows.
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
from router.policy.forecast import model_of, queued_s, rows_of, terms_of, transfer_s, wait_s


@dataclass(frozen=True, slots=True)
class SplitForecast:
    """Of the `num_offered` requests of the next `seconds`, and of answers that run now, `num_missed` would miss a goal:
    a number for each number of prefill workers that was looked at, the present one among them.

    The load was estimated from `num_seen` requests and will probably last for `lasting_s`. `load` describes it.
    """

    num_missed: Mapping[int, float]
    num_offered: float
    seconds: float
    lasting_s: float
    num_seen: int
    load: str


class SplitForecaster(Protocol):
    """Sees each request when it comes and when it has been answered, and predicts when it is asked."""

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """A request came, whatever becomes of it; it may have an answer of `most_output` tokens."""
        ...

    def turned_away(self, now: float) -> None:
        """A request was refused before it was read."""
        ...

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request was answered with so many tokens."""
        ...

    def forecast(
        self, workers: Collection[Worker], num_waiting: int, least: int, most: int, now: float
    ) -> SplitForecast | None:
        """What splits with `least` to `most` prefill workers would miss; None without goals or data.

        `workers` are all that are known, ready or not; `num_waiting` requests are on none of them.
        """
        ...


ALLOWED_SHARE, ALLOWED_S = 0.5, 1.0
"""How long prompts may wait: this share of the goal for a first token; without a goal so many seconds."""
ROOM = 0.8
"""The load, and the share of time spent with prompts, up to which a pool does well without the worker that it gives."""
IDLE_LOAD = 0.5
"""Prompts that wait longer than this share of what is allowed: prefill gives no worker."""
LEAST_SPLIT_GAIN = 0.95
"""Decode must be predicted to get below this share of its load: steps over few sequences take their time anyway."""
MAX_DRAIN_S = 5.0
"""A worker that would need longer to be empty is not the one to change."""
REFUSED_S = 2.0
"""How long after a refusal the pool that was too slow for that request still counts as behind: at most this, and half
of the time that a pool must be behind, so that one refusal changes nothing."""
LEAST_SAVED = 0.1
"""A split must be predicted to save this share of the requests: predictions err, and roles would flap."""
DOUBT = 0.4
"""And this share more, over the root of the number of requests from which the load was estimated."""
AS_GOOD = 0.02
"""Splits whose misses differ by less than this share of the requests are equal: the nearest one wins."""
ORDERS_S = 2.0
"""Orders of one decision are given within so long, or not at all."""
FORESEEN_S = 60.0
"""A split pays for at most so long: nothing is known of what lies further ahead."""
NOTICE_S = 1.0
"""A load that turns is noticed after so long."""
CHANGE_AFTER_S = 3.0
"""How long a pool must be behind without a pause before a worker changes its role."""
CHANGE_INTERVAL_S = 15.0
"""Least time between two changes of roles."""
BUSY_SMOOTHING = 0.1
"""The share of one more look in how busy prefill workers were: of four looks a second, half is from the last two."""


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """`ttft_s`, `tpot_s`: the goals, 0 without one. Pools keep `least` workers by role. A pool must be behind for
    `after_s` seconds, and changes lie `interval_s` apart."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    least: tuple[int, int] = (1, 1)
    after_s: float = CHANGE_AFTER_S
    interval_s: float = CHANGE_INTERVAL_S

    @property
    def allowed_s(self) -> float:
        """How long a prompt may wait for others."""
        return ALLOWED_SHARE * self.ttft_s if self.ttft_s > 0 else ALLOWED_S

    def least_of(self, role: Role) -> int:
        """How many ready workers of `role` remain; the last decode worker always does."""
        prefill, decode = self.least
        return prefill if role == "prefill" else max(1, decode)


@dataclass(frozen=True, slots=True)
class RoleChange:
    """An order: the worker at `address` becomes a `role` worker, because of `reason`, which has the numbers."""

    address: str
    role: Role
    reason: str


@dataclass(slots=True)
class RolePolicy:
    """Owned by one router, and asked at each of its ticks."""

    limits: RoleLimits
    _behind: Role | None = None
    _behind_since: float = 0.0
    _changed_at: float | None = None
    _busy: Ewma = field(default_factory=lambda: Ewma(BUSY_SMOOTHING, start=0.0))
    _refused_at: dict[Role, float] = field(default_factory=dict)
    _orders: deque[RoleChange] = field(default_factory=deque)
    _decided_at: float = 0.0

    def changed(self, now: float) -> None:
        """A worker changed its role, or was told to, by this router or another."""
        self._changed_at, self._behind = now, None

    def refused(self, role: Role, now: float) -> None:
        """A request was refused because the pool of this role would have been too slow for it."""
        self._refused_at[role] = now

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float, forecast: SplitForecast | None = None
    ) -> RoleChange | None:
        """The order to give now, out of all ready workers; mostly None.

        A decision may be several orders: ask again until there is none.
        """
        if (order := self._next(prefill, decode, now)) is not None:
            return order
        self._busy.observe(sum(bool(worker.load.num_queued_tokens) for worker in prefill) / max(1, len(prefill)))
        found = self._by_forecast(prefill, decode, forecast, now) if forecast is not None else []
        if not found and (one := self._by_signals(prefill, decode, forecast, now)) is not None:
            found = [one]
        if not found:
            self._behind = None
            return None
        role = found[0].role
        if role != self._behind:
            self._behind, self._behind_since = role, now
        rested = self._changed_at is None or now - self._changed_at >= self.limits.interval_s
        if not rested or now - self._behind_since < self.limits.after_s:
            return None
        self.changed(now)
        self._orders.extend(found)
        self._decided_at = now
        return self._next(prefill, decode, now)

    # ------------------------------------------------------------ inside

    def _next(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """The next order of the latest decision, if its worker is still where it was then."""
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
        """The orders that lead to the split that misses least, or as near to it as workers can change; mostly none."""
        missed, present, num = forecast.num_missed, len(prefill), len(prefill) + len(decode)
        if present not in missed:
            return []  # workers came or went since
        enough = min(missed.values()) + AS_GOOD * forecast.num_offered
        best = min((one for one in missed if missed[one] <= enough), key=lambda one: abs(one - present))
        if best == present:
            return []
        role: Role = "prefill" if best > present else "decode"
        least = self.limits.least_of("decode" if role == "prefill" else "prefill")
        pool = decode if role == "prefill" else prefill
        donors = _donors(pool, role, min(abs(best - present), len(pool) - least), now)
        after = present + (len(donors) if role == "prefill" else -len(donors))
        if not donors or not _pays(forecast, self.limits, present, after, num, [drain_of(one, now) for one in donors]):
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
        """One worker for the pool that is seen to be behind, unless the forecast says that this would do harm."""
        found = self._to_prefill(prefill, decode, now) or self._to_decode(prefill, decode, now)
        if found is None or forecast is None:
            return found
        present, missed = len(prefill), forecast.num_missed
        after = present + (1 if found.role == "prefill" else -1)
        if present not in missed or after not in missed:
            return None
        return found if missed[after] <= missed[present] + AS_GOOD * forecast.num_offered else None

    def _to_prefill(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """A decode worker for the prefill pool, if prompts wait too long and decode does well with one worker less."""
        waits_s, refuses = mean_wait_s(prefill or decode, now), self._refuses("prefill", now)
        num_left = len(decode) - 1
        if (waits_s <= self.limits.allowed_s and not refuses) or num_left < self.limits.least_of("decode"):
            return None
        then = decode_load(decode, len(decode) / num_left, self.limits.tpot_s)
        if then > ROOM or (donor := _donor(decode, "prefill", now)) is None:
            return None
        drain_s = drain_of(donor, now)
        if drain_s >= waits_s and not refuses:
            return None  # by the time that the worker is empty, the prompts are computed
        return RoleChange(
            donor.address,
            "prefill",
            f"prompts wait {waits_s:.2f} s for each other on {len(prefill)} prefill workers, allowed are "
            f"{self.limits.allowed_s:.2f}{_too(refuses)}; decode would be at {then:.2f} of its capacity with "
            f"{num_left} of {len(decode)} workers; drain {drain_s:.2f} s",
        )

    def _to_decode(self, prefill: Sequence[Worker], decode: Sequence[Worker], now: float) -> RoleChange | None:
        """A prefill worker for the decode pool, if that is full and the prefill pool does well with one worker less."""
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
            f"decode is at {load:.2f} of its capacity with {len(decode)} workers{_too(refuses)}, and would be at "
            f"{then:.2f} with one more; prefill would be busy for {busy:.2f} of the time with {num_left} of "
            f"{len(prefill)} workers; drain {drain_of(donor, now):.2f} s",
        )

    def _refuses(self, role: Role, now: float) -> bool:
        return now - self._refused_at.get(role, -math.inf) <= min(REFUSED_S, self.limits.after_s / 2)


def mean_wait_s(workers: Sequence[Worker], now: float) -> float:
    """Seconds that a prompt waits on a worker, on average; 0 without workers."""
    return sum(wait_s(worker, now) for worker in workers) / len(workers) if workers else 0.0


def decode_load(workers: Sequence[Worker], share: float, tpot_s: float) -> float:
    """The mean load of decode workers if each had `share` times the requests that it has; 1 is full."""
    return sum(_load_of(worker, share, tpot_s) for worker in workers) / len(workers) if workers else 0.0


def _too(refuses: bool) -> str:
    """For a reason."""
    return ", requests are refused" if refuses else ""


def drain_of(worker: Worker, now: float) -> float:
    """Seconds until the worker would be empty: its prompts are computed, its streams go to others."""
    if worker.role == "prefill":
        return wait_s(worker, now)
    rows = rows_of(worker)
    each_s = transfer_s(terms_of(worker), rows.context // rows.num_rows) if rows.num_rows else 0.0
    return queued_s(worker, now) + rows.num_rows * each_s


def _load_of(worker: Worker, share: float, tpot_s: float) -> float:
    hello, rows = worker.identity, rows_of(worker)
    places = worker.load.num_requests / max(1, hello.max_num_seqs)
    # Cached blocks count as free, and requests that are on their way count with what was booked for them.
    blocks = (hello.num_blocks - worker.load.num_available_blocks) / max(1, hello.num_blocks) / KV_TARGET
    load = share * max(places, blocks)
    model = model_of(worker)
    # A goal that one sequence alone misses counts for nothing: no number of workers would meet it.
    if tpot_s > 0 and rows.num_rows and model.seconds(StepShape.of_rows(1, rows.context // rows.num_rows)) <= tpot_s:
        shared = StepShape.of_rows(round(share * rows.num_rows), round(share * rows.context))
        load = max(load, model.seconds(shared) / tpot_s)
    return load


def _missed_at(forecast: SplitForecast, num_prefill: int) -> float:
    """What a split misses; of one that was not judged, what its nearest neighbour does."""
    return forecast.num_missed[min(forecast.num_missed, key=lambda one: abs(one - num_prefill))]


def _pays(
    forecast: SplitForecast, limits: RoleLimits, present: int, after: int, num: int, drains_s: Sequence[float]
) -> bool:
    """Whether a change saves more requests than are lost while its workers drain. `num` workers share the load.

    It helps until the load turns, and does harm from then on until that is seen and the workers have changed back.
    """
    saved = (forecast.num_missed[present] - _missed_at(forecast, after)) / forecast.seconds
    rate = forecast.num_offered / forecast.seconds
    if saved < (LEAST_SAVED + DOUBT / math.sqrt(max(1, forecast.num_seen))) * rate:
        return False
    helps_s = min(FORESEEN_S, forecast.lasting_s) - limits.after_s - NOTICE_S - 2 * max(drains_s)
    return saved * helps_s > rate * sum(drains_s) / num


def _donor(workers: Sequence[Worker], role: Role, now: float) -> Worker | None:
    """The worker that goes to the other pool first."""
    return next(iter(_donors(workers, role, 1, now)), None)


def _donors(workers: Sequence[Worker], role: Role, num: int, now: float) -> list[Worker]:
    """Up to `num` workers that go to the other pool: those that come home, then those drained soonest.

    Their streams and their KV need workers of the same layout, so the last of a layout stays, unless its pool is left
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
