"""Worker registry: which workers exist, which may get requests, and their load. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from msgspec.structs import replace

from common.cluster import RATE_WINDOW_S
from common.latency import NOTHING, LinkModel, StepModel, StepShape
from common.observe import Ewma, RecentRate
from common.wire import ROLES, Role
from common.wire.messages import WorkerHeartbeat, WorkerHello
from router.fleet.booking import Booking
from router.fleet.estimates import FirstTokenLag, OtherRouters, TokenPace
from router.fleet.readiness import absence_reason
from router.fleet.worker import SMOOTHING, Worker, WorkerState, order_of


class BookedWorkers:
    """Workers by address, with their bookings."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.next_serial = 1
        self.prefilled_tokens = RecentRate(RATE_WINDOW_S, from_start=True)  # of this router, by prefill workers
        self.on_changed: Callable[[Worker], None] = lambda worker: None
        """Called with a worker whose state, report or bookings changed, or that was removed."""

    def book(
        self,
        address: str,
        now: float,
        *,
        prompt: StepShape,
        num_blocks: int,
        priority: int = 0,
        num_tokens: int = 0,
        num_more: int = 0,
    ) -> Booking:
        """Book work that is sent under `next_serial`: `prompt` to compute, and `num_blocks` of KV.

        The blocks hold `num_tokens` tokens, including cached ones. The answer is predicted to need `num_more` blocks.
        """
        worker = self.workers[address]
        booking = Booking(self.next_serial, address, prompt, num_blocks, priority, num_tokens, 0, num_more)
        self.next_serial += 1
        worker.bookings.add(booking, now)
        self._changed(worker)
        return booking

    def computed(self, booking: Booking, now: float) -> Booking:
        """Remove the computed prompt from the booking. Returns the remaining booking."""
        worker = self.workers.get(booking.address)
        after = worker.bookings.computed(booking, now) if worker is not None else None
        if worker is None or after is None:
            return replace(booking, prompt=NOTHING)
        if worker.role == "prefill":
            self.prefilled_tokens.add(booking.prompt.num_tokens, now)
        self._changed(worker)
        return after

    def resize(self, address: str, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Set the grown and predicted blocks of bookings by serial. Ignores bookings that have ended."""
        worker = self.workers[address]
        for serial, (num_grown, num_more) in sizes.items():
            worker.bookings.resize(serial, num_grown, num_more)
        self._changed(worker)

    def release(self, booking: Booking) -> None:
        """End a booking. Does nothing if it, or the worker's incarnation, has already ended."""
        worker = self.workers.get(booking.address)
        if worker is not None and worker.bookings.release(booking):
            self._changed(worker)

    def _changed(self, worker: Worker) -> None:
        worker.forecast_inputs = None
        self.on_changed(worker)


MAX_SLOWNESS = 8.0
"""Maximum ratio of measured to predicted time of a first token."""
MAX_FORGIVEN = 4
"""Multiple of `worker_timeout_s` for which a delayed router tolerates silence."""
LOADING_SILENCE_S = 30.0
"""Silence, in seconds, of a worker that may still be loading: while it imports modules, it sends no heartbeats."""
NOT_READY = "connected, not ready yet"
NOTHING_OBSERVED: Mapping[int, float] = MappingProxyType({})


class WorkerRegistry(BookedWorkers):
    """Workers by address. A worker's incarnation is its epoch. It ends by a new epoch, silence or a broken connection.

    Methods that may end an incarnation return whether they did. Then all requests on the worker have failed, and their
    bookings are released.
    """

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], *, worker_timeout_s: float, router_id: str = ""
    ) -> None:
        """`router_id` determines the order of equally good workers, so that several routers spread their load."""
        super().__init__()
        self.router_id = router_id
        self._ready: dict[Role, list[Worker]] = {}
        self._draining: set[str] | None = None
        for address in prefill:
            self.add(address, "prefill")
        for address in decode:
            self.add(address, "decode")
        self._worker_timeout_s = worker_timeout_s
        self.explain: Callable[[Role, float], str] = lambda role, now: ""
        """Returns discovery's reason why no worker of a role is known; "" without discovery."""
        self.is_gone: Callable[[str], bool] = lambda digest: False
        """Returns whether an adapter, by digest, was unloaded on all workers."""
        self.has_adapter: Callable[[str], bool] = lambda name: False
        """Returns whether clients may request an adapter, by name."""
        self.role_changes: Counter[tuple[str, str]] = Counter()
        """Number of role changes by (from, to), whichever router ordered them."""
        self._models: dict[Role, StepModel] = {}
        self._links: dict[Role, LinkModel] = {}
        self._last_sweep: float | None = None
        self._weights_number = 0
        self.is_paused = False
        """Whether an order pauses all workers, so that new requests wait for the next order."""
        self._other_routers, self._pace = OtherRouters(), TokenPace()
        self._lags = {role: FirstTokenLag() for role in ROLES}
        self._observed: list[Worker] = []

    # ------------------------------------------------------------ membership

    def add(self, address: str, role: Role, withheld: str = "") -> None:
        """Add a worker at a new address."""
        self.workers[address] = Worker(address, role, withheld=withheld, order=order_of(self.router_id, address))

    def remove(self, address: str) -> None:
        """Remove a worker. Releasing its bookings has no effect from now on."""
        worker = self.workers.pop(address)
        worker.state = WorkerState.UNKNOWN
        self._regroup()
        self._changed(worker)

    def withhold(self, address: str, why: str) -> bool:
        """Withhold new requests from the worker for a reason, "" to resume. Returns True if that makes it ready."""
        worker = self.workers[address]
        was_ready = worker.ready
        worker.withheld = why
        self._regroup()
        self._changed(worker)
        return worker.ready and not was_ready

    def set_serving(self, weights_number: int, *, is_paused: bool) -> None:
        """Set the weights with which workers may serve, see `SetServing.weights_number`, and whether all are paused."""
        self._weights_number, self.is_paused = weights_number, is_paused
        for worker in self.workers.values():
            self._compare_weights(worker)

    # ------------------------------------------------------------ worker reports

    def on_hello(self, address: str, hello: WorkerHello, now: float) -> bool:
        """Process a hello. Returns True if it ends an earlier incarnation at this address.

        A dead worker that sends a hello stays dead until a heartbeat shows that its engine runs.
        """
        worker = self.workers[address]
        new_life = worker.life.known_epoch != hello.epoch
        worker.life.last_seen = now
        ended = new_life and worker.hello is not None
        if new_life:
            self._forget(worker)
            worker.life.begin()
            worker.estimates.lateness = Ewma(SMOOTHING, start=0.0)
        if worker.hello is None or new_life:
            worker.state, worker.reason, worker.life.step_changed = WorkerState.CONNECTED, NOT_READY, now
        self._follow_role(worker, hello)
        worker.introduce(hello)
        worker.life.known_epoch = hello.epoch
        self._regroup()
        if incompatibility := worker.incompatibility:
            worker.state, worker.reason = WorkerState.UNKNOWN, incompatibility
        self._changed(worker)
        return ended

    def on_heartbeat(self, address: str, beat: WorkerHeartbeat, now: float) -> bool:
        """Process a heartbeat. Returns True if it ends an incarnation, because its epoch differs from the hello."""
        worker = self.workers[address]
        worker.life.last_seen, worker.life.unreadable = now, ""
        if worker.hello is None:
            return False
        if beat.epoch != worker.hello.epoch:
            self._end(worker, WorkerState.UNKNOWN, f"restarted (epoch {beat.epoch} after {worker.hello.epoch})")
            worker.introduce(None)
            return True
        if worker.load.beat is None or worker.load.beat.step != beat.step or not worker.load.beat.ready:
            worker.life.step_changed = now
        worker.load.report(beat, now)
        self._compare_weights(worker)
        if beat.step_model.is_known:
            self._models[worker.role] = beat.step_model
        else:
            worker.load.pool_model = self._models.get(worker.role, StepModel())
        if (link := beat.links.usual).is_known:
            self._links[worker.role] = link
        else:
            worker.load.pool_link = self._links.get(worker.role, LinkModel())
        if worker.load.num_reported_requests:
            worker.life.idle_since = None
        elif worker.life.idle_since is None:
            worker.life.idle_since = now
        died = self._judge(worker, now)
        self._changed(worker)
        return died

    def on_cut(self, address: str) -> bool:
        """Process a broken connection, which may have lost messages. Returns True if it ends an incarnation."""
        worker = self.workers[address]
        had_life = worker.hello is not None and worker.state is not WorkerState.DEAD
        self._end(worker, WorkerState.UNKNOWN, "not reachable")
        worker.introduce(None)
        return had_life

    def on_forgotten(self, address: str) -> bool:
        """Process a hello with `lost_router`: the worker dropped this router's requests. Returns as `on_cut` does."""
        worker = self.workers[address]
        had_life = worker.hello is not None and worker.state in (
            WorkerState.CONNECTED,
            WorkerState.READY,
            WorkerState.DRAINING,
        )
        if had_life:
            self._end(worker, WorkerState.UNKNOWN, "the worker dropped this router's requests after silence")
            worker.introduce(None)
        return had_life

    def on_refused(self, address: str, why: str) -> None:
        """Record why no connection can be made, such as missing or untrusted keys."""
        worker = self.workers[address]
        if worker.hello is None:
            worker.reason = f"connection refused: {why}"

    def on_unreadable(self, address: str, why: str) -> None:
        """Record why a frame of the worker was dropped."""
        self.workers[address].life.unreadable = why

    def on_request_failed(self, address: str, now: float) -> None:
        """Record a request that failed on a live worker. Several in a row make it a suspect."""
        worker = self.workers[address]
        if worker.life.failed(now):
            self._changed(worker)

    def on_request_served(self, address: str) -> None:
        """Record that the worker has sent tokens."""
        worker = self.workers[address]
        if worker.life.served():
            self._changed(worker)

    def on_first_token(self, address: str, slowness: float) -> None:
        """Record a first token that took `slowness` times the predicted time."""
        bounded = min(MAX_SLOWNESS, max(1.0 / MAX_SLOWNESS, slowness))
        self.workers[address].estimates.lateness.observe(math.log(bounded))

    def on_lone_prompt(self, role: Role, measured_s: float, predicted_s: float) -> None:
        """Record the first token of a prompt that waited for no other: measured and predicted time in seconds."""
        self._lags[role].observe(measured_s, predicted_s)

    def on_observed(
        self,
        waits_s: Mapping[str, float],
        lasting_s: Mapping[str, float],
        waits_from: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Update the observed waits for first tokens and decode times by address. Absent addresses are reset.

        `waits_from`: the same waits for requests of at least a priority.
        """
        for worker in self._observed:
            worker.estimates.observe(0.0, 0.0, NOTHING_OBSERVED)
        waits_from = waits_from or {}
        addresses = {*waits_s, *lasting_s, *chain.from_iterable(waits_from.values())}
        self._observed = [self.workers[address] for address in addresses if address in self.workers]
        for worker in self._observed:
            address = worker.address
            wait_from = {priority: found.get(address, 0.0) for priority, found in waits_from.items()}
            worker.estimates.observe(waits_s.get(address, 0.0), lasting_s.get(address, 0.0), wait_from)

    def on_request_finished(self, address: str, decode_s: float, num_tokens: int = 0, predicted_s: float = 0.0) -> None:
        """Record a request that the worker decoded in `decode_s` seconds from its first token to its last.

        It had `num_tokens` tokens after the first, predicted to take `predicted_s` each.
        """
        worker = self.workers[address]
        self._pace.observe(decode_s, num_tokens, predicted_s)
        # The average is 0, for unknown, until the first request that took any time.
        if decode_s or worker.estimates.service_s.value:
            worker.estimates.service_s.observe(decode_s)

    def sweep(self, now: float) -> list[Worker]:
        """Return the workers that just died, because they are silent or their engine is stuck.

        If the router itself was delayed, messages may be unread, so silence is tolerated. The tolerance is limited to
        `MAX_FORGIVEN` timeouts, so that a router that is delayed repeatedly still detects dead workers.
        """
        late, held_up_s = self._is_late(now), now - (now if self._last_sweep is None else self._last_sweep)
        self._last_sweep, timeout_s, dead = now, self._worker_timeout_s, WorkerState.DEAD
        died = []
        for worker in self.workers.values():
            if worker.life.suspect and now >= worker.life.suspect_until:
                worker.life.suspect = False
                self._changed(worker)
            if worker.hello is None or worker.state is dead:
                continue
            if late:
                worker.life.step_changed = min(now, worker.life.step_changed + held_up_s - timeout_s / 2)
                if worker.life.forgive(now, MAX_FORGIVEN * timeout_s):
                    continue
            beat = worker.load.beat
            if now - (worker.life.last_seen or 0.0) > timeout_s:
                self._end(worker, dead, worker.life.silence(timeout_s))
                died.append(worker)
            elif beat is None or now - worker.life.step_changed <= beat.turn_limit_s:  # fast path
                continue
            elif worker.is_stuck(now) and self._judge(worker, now):
                died.append(worker)
        self._other_routers.observe(self.ready("decode"))
        other_routers, pace = self._other_routers.value, self._pace.value
        lags_s = {role: lag.seconds for role, lag in self._lags.items()}
        for worker in self.workers.values():
            estimates = worker.estimates
            estimates.other_routers, estimates.token_pace, estimates.lag_s = other_routers, pace, lags_s[worker.role]
        return died

    def is_in_doubt(self, now: float) -> bool:
        """Return whether a sweep would be late or find a silent worker. Then read messages first."""
        known = [worker for worker in self.workers.values() if worker.hello and worker.state is not WorkerState.DEAD]
        return self._is_late(now) or any(
            now - (worker.life.last_seen or 0.0) > self._worker_timeout_s for worker in known
        )

    def needs_hello(self, address: str) -> bool:
        """Return whether to send the worker a hello instead of a heartbeat."""
        worker = self.workers[address]
        return worker.hello is None or worker.state is WorkerState.DEAD

    # ------------------------------------------------------------ queries

    def ready(self, role: Role) -> list[Worker]:
        """Return the workers that may get new requests. The list must not be modified."""
        known = self._ready.get(role)
        if known is None:  # cached: a decision must not iterate over a thousand workers
            known = [worker for worker in self.workers.values() if worker.ready and worker.role == role]
            self._ready[role] = known
        return known

    def is_starting(self, role: Role, now: float) -> bool:
        """Return whether a worker of `role` has reported that it is loading its model."""
        return any(
            worker.role == role
            and worker.life.last_seen is not None
            and now - worker.life.last_seen < LOADING_SILENCE_S
            and not worker.life.has_served
            and (worker.hello is None or not worker.incompatibility)
            for worker in self.workers.values()
        )

    @property
    def draining(self) -> set[str]:
        """Addresses of draining workers. The set must not be modified."""
        if self._draining is None:
            draining = (worker for worker in self.workers.values() if worker.state is WorkerState.DRAINING)
            self._draining = {worker.address for worker in draining}
        return self._draining

    def missing(self, role: Role, now: float) -> str:
        """Return in one line why no worker of `role` is ready; "" if one is."""
        return absence_reason(role, self.workers.values(), now, self.explain)

    def max_model_len(self) -> int:
        """Return the maximum sequence length over all ready workers; 0 if none is ready."""
        return min((worker.max_tokens for worker in self.workers.values() if worker.ready), default=0)

    # ------------------------------------------------------------ inside

    def _regroup(self) -> None:
        """Invalidate the cached sets of ready and draining workers."""
        self._ready.clear()
        self._draining = None

    def _follow_role(self, worker: Worker, hello: WorkerHello) -> None:
        """Update the role of a worker that was started in the configured role."""
        role = next((role for role in ROLES if role == hello.role), None)
        if role is None or role == worker.role or hello.home != worker.home:
            return
        if worker.life.known_epoch is not None:  # else it changed before this router connected
            self.role_changes[worker.role, role] += 1
        worker.role, worker.load.pool_model = role, self._models.get(role, StepModel())

    def _is_late(self, now: float) -> bool:
        """Return whether the last sweep was so long ago that messages may be unread."""
        return self._last_sweep is not None and now - self._last_sweep > self._worker_timeout_s / 2

    def _compare_weights(self, worker: Worker) -> None:
        beat = worker.load.beat
        number = beat.serving.active_number if beat is not None and beat.serving is not None else 0
        if worker.outdated != (outdated := number != self._weights_number):
            worker.outdated = outdated
            self._regroup()
            self._changed(worker)

    def _judge(self, worker: Worker, now: float) -> bool:
        """Set the state implied by the last heartbeat. Returns True if the worker died."""
        beat, was = worker.load.beat, worker.state
        alive = was is not WorkerState.DEAD
        if beat is None or worker.incompatibility:
            return False
        if worker.is_stuck(now):
            if alive:
                stuck = f"no step completed for more than {beat.turn_limit_s:g} s (step {beat.step})"
                self._end(worker, WorkerState.DEAD, stuck, keep_beat=True)
            return alive
        if beat.draining:
            worker.state, worker.reason = WorkerState.DRAINING, "draining"
        elif beat.ready:
            worker.state, worker.reason, worker.life.has_served = WorkerState.READY, "", True
        else:
            worker.state, worker.reason = WorkerState.CONNECTED, NOT_READY
        if worker.state is not was:
            self._regroup()
        return False

    def _end(self, worker: Worker, state: WorkerState, reason: str, *, keep_beat: bool = False) -> None:
        beat, step_changed = worker.load.beat, worker.life.step_changed
        self._forget(worker)
        worker.state, worker.reason = state, reason
        self._regroup()
        if keep_beat:  # a stuck engine that still sends heartbeats stays dead until its step advances
            worker.load.beat, worker.life.step_changed = beat, step_changed
        self._changed(worker)

    def _forget(self, worker: Worker) -> None:
        worker.load.beat, worker.life.idle_since = None, None
        worker.bookings.clear()
