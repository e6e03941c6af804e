"""Serves token streams from the pools: the one place that decides where a request runs, when it moves and when it ends.

    admit ─> queue ─> placed on P and D ─> first token (P) ─> tokens (D) ─> finished
               ^          │ P lost before D delivered: next attempt, same D, another P or none
               └──────────┘ D lost: next attempt anywhere, the output so far becomes part of the prompt

Everything between two awaits is immediate: workers' messages, lost workers and ticks change a `Flight`, and the
consumer waits on nothing but its flight, whose deadline timer bounds that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from diptych.common.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable
from diptych.common.messages import PromptScores, RequestFailed, ResetPrefixCache, TokenDelta, TokenOutput
from diptych.common.settings import RouterConfig
from diptych.router.dispatch.admission import Admission
from diptych.router.dispatch.client import GenerationRequest, TokenEvent
from diptych.router.dispatch.demand import Demand, DemandMeter
from diptych.router.dispatch.fleet import CONTROL_HWM, WorkerFleet
from diptych.router.dispatch.flight import Assignment, Flight, Stage
from diptych.router.dispatch.handover import HandOvers
from diptych.router.dispatch.load import DispatchCounters, DispatchLoad, WorkerLoad
from diptych.router.dispatch.placement import Placement
from diptych.router.dispatch.policy import RoutingPolicy
from diptych.router.dispatch.prefix_index import PrefixIndex
from diptych.router.dispatch.recovery import Recovery
from diptych.router.dispatch.stream import StreamConflict
from diptych.router.dispatch.worker import WorkerState

RETRY_AFTER_S = 1.0
DEADLINE_SLACK_S = 0.1
"""A worker's clock of the same deadline may ring this much earlier than ours."""


class Dispatcher:
    """The `GenerationClient` over ZeroMQ. Owned by one event loop: `start`, serve, `close`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        policy: RoutingPolicy | None = None,
        hwm: int = CONTROL_HWM,
    ) -> None:
        self._config = config
        self._clock = time.monotonic
        self._flights: dict[str, Flight] = {}
        self._queue: dict[str, Flight] = {}
        self._index = PrefixIndex()
        self._counters = DispatchCounters()
        self._last_max_model_len = 0
        self._open = False
        self.fleet = WorkerFleet(config, self, hwm=hwm, clock=self._clock)
        self._placement = Placement(
            self.fleet.registry,
            policy or RoutingPolicy(local_prefill_threshold=config.local_prefill_threshold),
            self._index,
            self.fleet.send,
            self.fleet.abort,
            self._remaining_s,
        )
        has_prefill = bool(config.prefill or config.prefill_services)
        self._demand = DemandMeter(has_prefill, config.local_prefill_threshold)
        self._recovery = Recovery(config.max_retries, self._placement, self._queue, self._counters)
        self._admission = Admission(self.fleet.registry, config, self._counters)
        self._handovers = HandOvers(self.fleet.registry, self._placement, self._queue, self._counters)

    # ------------------------------------------------------------ for the front

    async def start(self) -> None:
        """Connect to the workers; returns at once. Requests wait until workers are ready."""
        await self.fleet.start()
        self._open = True

    async def close(self) -> None:
        """Fail what is in flight, tell the workers, close every socket. Takes well under a second."""
        self._open = False
        for flight in list(self._flights.values()):
            self._fail(flight, Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S))
        await self.fleet.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `GenerationClient.generate`."""
        flight = self._admit(request)
        try:
            self._try_place(flight, self._clock())
            while True:
                event = await flight.next_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            self._end(flight)

    def check_room(self, is_longer: Callable[[int], bool]) -> None:
        """See `GenerationClient.check_room`."""
        self._check_bounds()
        self._admission.check_unread(is_longer)

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and why not, or not by both pools: decode workers can prefill."""
        if not self._open:
            return False, "the router is not connected to its workers"
        if self.fleet.failure:
            return False, self.fleet.failure
        registry, now = self.fleet.registry, self._clock()
        if missing := registry.missing("decode", now):
            return False, missing
        alone = registry.missing("prefill", now) if self._demand.has_prefill else ""
        return True, alone or self.fleet.pairing.note

    @property
    def max_model_len(self) -> int:
        """The longest sequence that all ready workers take, or took when some were last ready; 0 before that."""
        self._last_max_model_len = self.fleet.registry.max_model_len() or self._last_max_model_len
        return self._last_max_model_len

    def reset_prefix_cache(self) -> None:
        """Have every worker forget what it cached, and forget what this router believes of it."""
        self._index.clear_all()
        for address in self.fleet.connections:
            self.fleet.send(address, ResetPrefixCache(request_id="reset"))

    def load(self) -> DispatchLoad:
        """Where requests are and how the workers are, in numbers."""
        stages = dict.fromkeys((str(stage) for stage in Stage if stage is not Stage.DONE), 0)
        stages |= Counter(str(flight.stage) for flight in self._flights.values() if not flight.done)
        counters = self._counters
        return DispatchLoad(
            stages,
            tuple(WorkerLoad.of(self.fleet.registry.workers[a], link) for a, link in self.fleet.connections.items()),
            dict(counters.num_retries),
            dict(counters.num_failures),
            dict(counters.num_choices),
            counters.num_stale_deltas,
            num_handovers=dict(counters.num_handovers),
            wait_limit_s=self._admission.limit_s,
        )

    def demand(self, p95_token_s: float, slo_s: float) -> Demand:
        """What is asked of the pools; see `DemandMeter.measure`."""
        queue, workers = self._queue.values(), self.fleet.registry.workers.values()
        return self._demand.measure(self._flights.values(), queue, workers, p95_token_s, slo_s)

    # ------------------------------------------------------------ for the fleet

    def on_output(self, address: str, output: TokenOutput) -> None:
        for delta in output.outputs:
            if (told := self._told(address, output.epoch, delta)) is not None:
                self._on_delta(*told, delta)
        if self.fleet.registry.workers[address].state is WorkerState.DRAINING:  # sooner than at the next tick
            known = (self._flights.get(delta.request_id) for delta in output.outputs)
            self._handovers.leave((flight for flight in known if flight is not None), self._clock())

    def on_scores(self, address: str, scores: PromptScores) -> None:
        if (told := self._told(address, scores.epoch, scores)) is None:
            return
        flight, assignment = told
        try:
            flight.scored(scores, self._clock())
        except StreamConflict as conflict:
            self._recover(flight, assignment, f"{assignment.role} worker {assignment.worker_id} sent {conflict}")

    def on_failed(self, address: str, failed: RequestFailed) -> None:
        flight = self._flights.get(failed.request_id)
        if flight is None or flight.done:
            return
        if flight.may_give_up_handover(address, failed.attempt):
            self._give_up_handover(flight, f"worker {failed.worker_id} failed in {failed.phase}: {failed.message}")
            return
        assignment = flight.assignment(address, failed.attempt)
        if assignment is None or failed.attempt != assignment.attempt:
            return
        reason = f"{assignment.role} worker {failed.worker_id} failed in {failed.phase}: {failed.message}"
        if failed.retryable or flight.is_through_with(assignment):
            self._recover(flight, assignment, reason)
        else:
            self._fail(flight, _refusal(failed, reason, self._remaining_s(flight)))

    def on_lost(self, address: str, reason: str) -> None:
        for flight in list(self._flights.values()):
            for assignment in (flight.successor, flight.prefill, flight.decode):
                if assignment is not None and assignment.address == address and not flight.done:
                    why = f"{assignment.role} worker {assignment.worker_id} {reason}"
                    self._recover(flight, assignment, why, died=True)

    def on_started(self, address: str) -> None:
        self._index.clear(address)
        self._admission.forget(address)

    def on_gone(self, address: str) -> None:
        self.on_started(address)

    def uses(self, address: str) -> bool:
        return any(
            assignment is not None and assignment.address == address
            for flight in self._flights.values()
            if not flight.done
            # A prefill worker's part is over when the decode worker speaks.
            for assignment in (
                (flight.decode, flight.successor)
                if flight.stage is Stage.DECODE
                else (flight.prefill, flight.decode, flight.successor)
            )
        )

    def on_ready(self, address: str) -> None:
        epoch = self.fleet.registry.workers[address].epoch
        for flight in self._flights.values():
            flight.lives(address, epoch)
        self._serve_queue(self._clock())

    def on_tick(self, now: float) -> None:
        self._handovers.leave(self._flights.values(), now)
        self._serve_queue(now)
        for flight in list(self._flights.values()):
            self._check_progress(flight, now)
        self._admission.observe(self._flights.values(), now)
        for flight, error in self._admission.shed(self._flights.values(), now):
            self._fail(flight, error)

    # ------------------------------------------------------------ a request's life

    def _check_bounds(self) -> None:
        if not self._open:
            raise Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S)
        if len(self._flights) >= self._config.max_inflight:
            num = self._config.max_inflight
            raise Unavailable(f"{num} requests are in flight, the most this router takes", retry_after_s=RETRY_AFTER_S)

    def _admit(self, request: GenerationRequest) -> Flight:
        self._check_bounds()
        if request.request_id in self._flights:
            raise InvalidRequest(f"request {request.request_id} is already being served", param="request_id")
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self._admission.check(len(request.prompt_token_ids))
        try:
            flight = Flight(request, self._clock())
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"the prompt holds what is no token id: {error}", param="prompt") from error
        self._flights[request.request_id] = flight
        loop = asyncio.get_running_loop()
        flight.deadline_timer = loop.call_later(request.deadline_s, self._on_deadline, flight)
        self._queue[request.request_id] = flight
        return flight

    def _serve_queue(self, now: float) -> None:
        """Place what waits, oldest first; what waited too long fails."""
        for flight in list(self._queue.values()):
            if self._try_place(flight, now) or now - flight.queued_at <= self._config.queue_timeout_s:
                continue
            why = flight.last_failure or self.fleet.registry.missing("decode", now) or "workers take no messages"
            waited = f"waited {now - flight.queued_at:.1f} s for a worker: {why}"
            self._fail(flight, Unavailable(waited, retry_after_s=RETRY_AFTER_S))

    def _try_place(self, flight: Flight, now: float) -> bool:
        if now < flight.not_before or not self._recovery.may_be_placed(flight):
            return False
        if not self._placement.place(flight, now):
            return False
        self._admission.expect(flight)
        del self._queue[flight.request.request_id]
        kind = "prefill" if flight.decode is None else "remote" if flight.prefill else "local"
        self._counters.num_choices[kind] += 1
        return True

    def _told(self, address: str, epoch: int, said: TokenDelta | PromptScores) -> tuple[Flight, Assignment] | None:
        """Whose request a worker speaks of; None, and the worker is told to stop, if it is not to be listened to."""
        worker = self.fleet.registry.workers[address]
        current = worker.hello is not None and worker.epoch == epoch
        flight = self._flights.get(said.request_id)
        assignment = flight.assignment(address, said.attempt) if flight and current and not flight.done else None
        if flight is not None and assignment is not None and assignment.epoch == epoch:
            return flight, assignment
        self._counters.num_stale_deltas += 1
        if current:  # whoever was to be told that this is over has not heard it
            self.fleet.abort(address, said.request_id, said.attempt)
        return None

    def _on_delta(self, flight: Flight, assignment: Assignment, delta: TokenDelta) -> None:
        first = not assignment.delivered
        if delta.finish_reason in ("abort", "moved"):
            self._on_left(flight, assignment, delta.finish_reason)
            return
        if assignment is flight.successor:
            self._take_over(flight, moved=False)
        now = self._clock()
        if first:
            self._admission.learn(flight, assignment, now)
        try:
            flight.received(assignment, delta, now)
        except StreamConflict as conflict:
            self._recover(flight, assignment, f"{assignment.role} worker {assignment.worker_id} sent {conflict}")
            return
        if first:
            self.fleet.registry.on_request_served(assignment.address)
            self._placement.computed(assignment)
            if assignment is flight.decode:
                self._placement.remember(flight, assignment)
                self._placement.spare_prefill(flight)
        if flight.stream.finish_reason:
            self._finish(flight, assignment)
        elif flight.decode is None:
            self._recover(flight, assignment, f"prefill worker {assignment.worker_id} did not end a one-token request")

    def _on_left(self, flight: Flight, assignment: Assignment, how: str) -> None:
        """The worker does not go on with a request that is not over: another does by now, or has to."""
        if how == "moved" and assignment is flight.decode and flight.successor is not None:
            self._take_over(flight, moved=True)
        else:
            self._recover(flight, assignment, f"{assignment.role} worker {assignment.worker_id} {how} the request")

    def _take_over(self, flight: Flight, *, moved: bool) -> None:
        now = self._clock()
        self._handovers.succeed(flight, now, moved=moved)
        self._handovers.leave(self._flights.values(), now)

    def _give_up_handover(self, flight: Flight, reason: str) -> None:
        now = self._clock()
        self._handovers.fail(flight, reason, now)
        self._handovers.leave(self._flights.values(), now)

    def _finish(self, flight: Flight, last: Assignment) -> None:
        """The last token is here. A decode worker that still expects KV is told not to."""
        flight.done = True
        self._placement.settle(flight)
        if flight.decode is not None and last is flight.decode:
            self._placement.remember(flight, last)
            self.fleet.registry.on_request_finished(last.address, last.timeline.decode_s)
        elif flight.decode is not None:
            self.fleet.abort(flight.decode.address, flight.request.request_id, flight.attempt)

    def _recover(self, flight: Flight, assignment: Assignment, reason: str, *, died: bool = False) -> None:
        now = self._clock()
        if assignment is flight.successor:
            self._give_up_handover(flight, reason)
            return
        if self.fleet.registry.workers[assignment.address].ready:
            self.fleet.registry.on_request_failed(assignment.address, now)
        error = self._recovery.recover(flight, assignment, reason, now, died=died)
        if error is not None:
            self._fail(flight, error)
        elif flight.request.request_id in self._queue:
            self._try_place(flight, now)

    def _check_progress(self, flight: Flight, now: float) -> None:
        """A worker that lost a message of ours, or whose message was lost, looks healthy: notice it here."""
        assignment = flight.waits_for
        if flight.done or assignment is None:
            return
        who, waited_s = f"{assignment.role} worker {assignment.worker_id}", now - flight.progress_at
        if waited_s > self._token_limit_s(flight):
            self._recover(flight, assignment, f"{who} sent no token for {waited_s:.1f} s in the {flight.stage} phase")
        elif waited_s > self._config.worker_timeout_s:
            idle_since = self.fleet.registry.workers[assignment.address].idle_since
            if flight.stream.has_gap:
                self._recover(flight, assignment, f"tokens of {who} are missing")
            elif idle_since is not None and now - idle_since > self._config.worker_timeout_s:
                self._recover(flight, assignment, f"{who} has lost the request")

    def _on_deadline(self, flight: Flight) -> None:
        if not flight.done:
            allowed = f"{flight.request.deadline_s:g} s"
            self._fail(flight, DeadlineExceeded(f"the request's {allowed} were over in its {flight.stage} phase"))

    def _fail(self, flight: Flight, error: RequestError) -> None:
        if flight.done:
            return
        self._counters.num_failures[type(error).__name__] += 1
        self._queue.pop(flight.request.request_id, None)
        self._placement.withdraw(flight)
        flight.fail(error)

    def _end(self, flight: Flight) -> None:
        """The consumer is through with the request, whether it is over or not."""
        if flight.deadline_timer is not None:
            flight.deadline_timer.cancel()
        self._queue.pop(flight.request.request_id, None)
        self._flights.pop(flight.request.request_id, None)
        if not flight.done:
            flight.done = True
            self._placement.withdraw(flight)

    # ------------------------------------------------------------ inside

    def _token_limit_s(self, flight: Flight) -> float:
        """How long the next token of a placed request may take."""
        prefills = flight.stage is Stage.PREFILL
        return self._config.prefill_timeout_s if prefills else self._config.token_timeout_s

    def _remaining_s(self, flight: Flight) -> float:
        return max(0.0, flight.deadline - self._clock())


def _refusal(failed: RequestFailed, reason: str, remaining_s: float) -> RequestError:
    """The error of a failure that no other worker would mend.

    What a worker refuses before computing is the request's own fault and never a 5xx, which clients would retry.
    """
    if remaining_s < DEADLINE_SLACK_S:
        return DeadlineExceeded(reason)
    return InvalidRequest(failed.message) if failed.phase in ("queue", "grammar") else InternalError(reason)
