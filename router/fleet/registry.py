"""Which workers exist, which may be given work, and how much they have. Pure: `now` comes in, decisions go out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from msgspec.structs import replace

from common.latency import NOTHING, LinkModel, StepModel, StepShape
from common.observe import Ewma
from common.wire import ROLES, Role
from common.wire.messages import WorkerHeartbeat, WorkerHello
from router.fleet.booking import Booking
from router.fleet.estimates import FirstTokenLag, Rivals, TokenPace
from router.fleet.readiness import absence_of
from router.fleet.worker import SMOOTHING, Worker, WorkerState, order_of


class BookedWorkers:
    """Workers by address, and the books of what is booked on each."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.next_serial = 1
        self.on_changed: Callable[[Worker], None] = lambda worker: None
        """Is told of a worker whose state, report or bookings changed, or that is gone and thus not ready."""

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
        """Count work that is sent under `next_serial`: `prompt` to compute, `num_blocks` of KV to hold.

        They hold `num_tokens` tokens, cached ones included, and the answer will probably need `num_more` blocks.
        """
        worker = self.workers[address]
        booking = Booking(self.next_serial, address, prompt, num_blocks, priority, num_tokens, 0, num_more)
        self.next_serial += 1
        worker.bookings.add(booking, now)
        self._changed(worker)
        return booking

    def computed(self, booking: Booking, now: float) -> Booking:
        """The prompt is computed: drop it from the booking, and return what is left of that."""
        worker = self.workers.get(booking.address)
        after = worker.bookings.computed(booking, now) if worker is not None else None
        if worker is None or after is None:
            return replace(booking, prompt=NOTHING)
        self._changed(worker)
        return after

    def resize(self, address: str, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Set how many blocks bookings have gained, and will gain, by serial. Those that have ended are left out."""
        worker = self.workers[address]
        for serial, (num_grown, num_more) in sizes.items():
            worker.bookings.resize(serial, num_grown, num_more)
        self._changed(worker)

    def release(self, booking: Booking) -> None:
        """The work has ended. Does nothing the second time, and once the worker's life has ended."""
        worker = self.workers.get(booking.address)
        if worker is not None and worker.bookings.release(booking):
            self._changed(worker)

    def _changed(self, worker: Worker) -> None:
        worker.terms = None
        self.on_changed(worker)


MAX_SLOWNESS = 8.0
"""How many times later than predicted a first token counts at most."""
MAX_FORGIVEN = 4
"""A router that was held up forgives silence for this many times `worker_timeout_s`."""
NOT_READY = "connected, not ready yet"
NOTHING_OBSERVED: Mapping[int, float] = MappingProxyType({})


class WorkerRegistry(BookedWorkers):
    """Workers by address. A worker's life is its epoch: a new epoch, silence or a cut connection ends it.

    Methods that may end a life return whether they did. All requests on the worker have then failed, and their
    bookings are released.
    """

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], *, worker_timeout_s: float, router_id: str = ""
    ) -> None:
        """Each `router_id` has an order of its own for equal workers: routers that see the same loads spread."""
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
        """Discovery's answer to why no worker of a role is known; "" without discovery."""
        self.is_gone: Callable[[str], bool] = lambda digest: False
        """Whether an adapter, by its digest, was unloaded everywhere."""
        self.role_changes: Counter[tuple[str, str]] = Counter()
        """How often workers changed their roles, by (from, to), whichever router had ordered it."""
        self._models: dict[Role, StepModel] = {}
        self._links: dict[Role, LinkModel] = {}
        self._last_sweep: float | None = None
        self._rivals, self._pace = Rivals(), TokenPace()
        self._lags = {role: FirstTokenLag() for role in ROLES}
        self._observed: list[Worker] = []

    # ------------------------------------------------------------ which workers there are

    def add(self, address: str, role: Role, withheld: str = "") -> None:
        """Add a worker at a new address."""
        self.workers[address] = Worker(address, role, withheld=withheld, order=order_of(self.router_id, address))

    def remove(self, address: str) -> None:
        """Forget the worker; releasing what was booked on it does nothing from now on."""
        worker = self.workers.pop(address)
        worker.state = WorkerState.UNKNOWN
        self._regroup()
        self._changed(worker)

    def withhold(self, address: str, why: str) -> bool:
        """Give the worker no new work, or with "" give it work again. True when that makes it ready."""
        worker = self.workers[address]
        was_ready = worker.ready
        worker.withheld = why
        self._regroup()
        self._changed(worker)
        return worker.ready and not was_ready

    # ------------------------------------------------------------ what workers say

    def on_hello(self, address: str, hello: WorkerHello, now: float) -> bool:
        """The worker said who it is. True when that ends an earlier life at this address.

        A dead worker that says hello again stays dead until a heartbeat shows that its engine turns.
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
        if misfit := worker.misfit:
            worker.state, worker.reason = WorkerState.UNKNOWN, misfit
        self._changed(worker)
        return ended

    def on_heartbeat(self, address: str, beat: WorkerHeartbeat, now: float) -> bool:
        """The worker reports. True when its epoch is another than in its hello, which ends a life."""
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
        """The connection broke. Messages may be lost both ways, so the life ends; True when there was one."""
        worker = self.workers[address]
        had_life = worker.hello is not None and worker.state is not WorkerState.DEAD
        self._end(worker, WorkerState.UNKNOWN, "not reachable")
        worker.introduce(None)
        return had_life

    def on_forgotten(self, address: str) -> bool:
        """The worker took this router for dead and dropped its requests. True when that ends a life."""
        worker = self.workers[address]
        had_life = worker.hello is not None and worker.state in (
            WorkerState.CONNECTED,
            WorkerState.READY,
            WorkerState.DRAINING,
        )
        if had_life:
            self._end(worker, WorkerState.UNKNOWN, "had lost this router")
            worker.introduce(None)
        return had_life

    def on_refused(self, address: str, why: str) -> None:
        """No connection can be made: one side lacks keys, or does not trust those of the other."""
        worker = self.workers[address]
        if worker.hello is None:
            worker.reason = f"cannot be talked to: {why}"

    def on_unreadable(self, address: str, why: str) -> None:
        """A frame of the worker was dropped."""
        self.workers[address].life.unreadable = why

    def on_request_failed(self, address: str, now: float) -> None:
        """A living worker failed a request: after a few in a row, others are preferred for a while."""
        worker = self.workers[address]
        if worker.life.failed(now):
            self._changed(worker)

    def on_request_served(self, address: str) -> None:
        """Tokens came from the worker."""
        worker = self.workers[address]
        if worker.life.served():
            self._changed(worker)

    def on_first_token(self, address: str, slowness: float) -> None:
        """A first token took `slowness` times as long as predicted."""
        bounded = min(MAX_SLOWNESS, max(1.0 / MAX_SLOWNESS, slowness))
        self.workers[address].estimates.lateness.observe(math.log(bounded))

    def on_lone_prompt(self, role: Role, measured_s: float, predicted_s: float) -> None:
        """A prompt that waited for no other had its first token after `measured_s`, by the model `predicted_s`."""
        self._lags[role].observe(measured_s, predicted_s)

    def on_observed(
        self,
        waits_s: Mapping[str, float],
        lasting_s: Mapping[str, float],
        waits_from: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """By address, how long requests have waited for first tokens, and been decoded; of no others is that known.

        `waits_from`: how long those of at least such a priority have waited.
        """
        for worker in self._observed:
            worker.estimates.observe(0.0, 0.0, NOTHING_OBSERVED)
        waits_from = waits_from or {}
        addresses = {*waits_s, *lasting_s, *chain.from_iterable(waits_from.values())}  # a few of a thousand
        self._observed = [self.workers[address] for address in addresses if address in self.workers]
        for worker in self._observed:
            address = worker.address
            wait_from = {priority: found.get(address, 0.0) for priority, found in waits_from.items()}
            worker.estimates.observe(waits_s.get(address, 0.0), lasting_s.get(address, 0.0), wait_from)

    def on_request_finished(self, address: str, decode_s: float, num_tokens: int = 0, predicted_s: float = 0.0) -> None:
        """The worker decoded a request, from its first token to its last, in `decode_s` seconds.

        It had `num_tokens` tokens after the first, for each of which the worker's model predicted `predicted_s`.
        """
        worker = self.workers[address]
        self._pace.observe(decode_s, num_tokens, predicted_s)
        if (
            decode_s or worker.estimates.service_s.value
        ):  # 0 stands for unknown until the first request that took any time
            worker.estimates.service_s.observe(decode_s)

    def sweep(self, now: float) -> list[Worker]:
        """Workers that just died of silence or of a stuck engine.

        A caller that was held up may have left messages unread, so it forgives silence, but within `MAX_FORGIVEN`:
        a caller that is held up again and again must still notice a dead worker.
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
            elif beat is None or now - worker.life.step_changed <= beat.turn_limit_s:  # as a rule: no call for each
                continue
            elif worker.is_stuck(now) and self._judge(worker, now):
                died.append(worker)
        self._rivals.observe(self.ready("decode"))
        rivals, pace = self._rivals.value, self._pace.value
        lags_s = {role: lag.seconds for role, lag in self._lags.items()}
        for worker in self.workers.values():
            estimates = worker.estimates
            estimates.rivals, estimates.token_pace, estimates.lag_s = rivals, pace, lags_s[worker.role]
        return died

    def is_in_doubt(self, now: float) -> bool:
        """Whether a sweep would come late or find a worker silent: read its messages first."""
        known = [worker for worker in self.workers.values() if worker.hello and worker.state is not WorkerState.DEAD]
        return self._is_late(now) or any(
            now - (worker.life.last_seen or 0.0) > self._worker_timeout_s for worker in known
        )

    def needs_hello(self, address: str) -> bool:
        """Whether to send the worker a hello rather than a heartbeat."""
        worker = self.workers[address]
        return worker.hello is None or worker.state is WorkerState.DEAD

    # ------------------------------------------------------------ what the router asks

    def ready(self, role: Role) -> list[Worker]:
        """Workers that may get new work. Not to be changed."""
        known = self._ready.get(role)
        if known is None:  # kept: a decision must not look at each of a thousand to know
            known = [worker for worker in self.workers.values() if worker.ready and worker.role == role]
            self._ready[role] = known
        return known

    @property
    def draining(self) -> set[str]:
        """Addresses of draining workers. Not to be changed."""
        if self._draining is None:
            draining = (worker for worker in self.workers.values() if worker.state is WorkerState.DRAINING)
            self._draining = {worker.address for worker in draining}
        return self._draining

    def missing(self, role: Role, now: float) -> str:
        """Why no worker of `role` is ready, in one line; "" when one is."""
        return absence_of(role, self.workers.values(), now, self.explain)

    def max_model_len(self) -> int:
        """The longest sequence that every ready worker takes; 0 when none is ready."""
        return min((worker.max_tokens for worker in self.workers.values() if worker.ready), default=0)

    # ------------------------------------------------------------ inside

    def _regroup(self) -> None:
        """A worker became ready or draining, or is no longer so."""
        self._ready.clear()
        self._draining = None

    def _follow_role(self, worker: Worker, hello: WorkerHello) -> None:
        """Take over the present role of a worker whose home is the configured one."""
        role = next((role for role in ROLES if role == hello.role), None)
        if role is None or role == worker.role or hello.home != worker.home:
            return
        if worker.life.known_epoch is not None:  # else it had changed before this router knew it
            self.role_changes[worker.role, role] += 1
        worker.role, worker.load.pool_model = role, self._models.get(role, StepModel())

    def _is_late(self, now: float) -> bool:
        """Whether the last sweep is so long ago that messages may be unread."""
        return self._last_sweep is not None and now - self._last_sweep > self._worker_timeout_s / 2

    def _judge(self, worker: Worker, now: float) -> bool:
        """Set the state that the last heartbeat implies. True when the worker died of it."""
        beat, was = worker.load.beat, worker.state
        alive = was is not WorkerState.DEAD
        if beat is None or worker.misfit:
            return False
        if worker.is_stuck(now):
            if alive:
                stuck = f"stuck at step {beat.step} for more than {beat.turn_limit_s:g} s"
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
        if keep_beat:  # a stuck engine that still sends heartbeats stays dead until its step moves
            worker.load.beat, worker.life.step_changed = beat, step_changed
        self._changed(worker)

    def _forget(self, worker: Worker) -> None:
        worker.load.beat, worker.life.idle_since = None, None
        worker.bookings.clear()
