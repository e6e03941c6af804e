"""Serves token streams from the pools: the one place that decides where a request runs, when it moves and when it ends.

    admit ─> queue ─> placed on P and D ─> first token (P) ─> tokens (D) ─> finished
               ^          │ P lost before D delivered: next attempt, same D, another P or none
               └──────────┘ D lost: next attempt anywhere, the output so far becomes part of the prompt

Nothing here waits but the consumer of a stream: workers' messages, lost workers and ticks change a `RequestState`,
and the consumer waits for its next event until the request's deadline at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable

from common.config import RouterConfig
from common.errors import DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from common.wire.messages import PromptLogprobs, RequestFailed, ResetPrefixCache, TokenDelta, TokenOutput
from router.dispatch.admission import Admission
from router.dispatch.client import RETRY_AFTER_S, GenerationRequest, TokenEvent
from router.dispatch.demand import Demand, DemandMeter
from router.dispatch.forecast import RequestShape
from router.dispatch.handover import HandOvers
from router.dispatch.load import DispatchCounters, DispatchLoad
from router.dispatch.placement import Placement
from router.dispatch.policy import Choice, RoutingPolicy
from router.dispatch.recovery import Recovery, refusal
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.silence import why_left
from router.dispatch.stream import StreamConflict, TokensDiffer
from router.fleet.fleet import CONTROL_HWM, WorkerFleet
from router.fleet.prefix_index import PrefixIndex
from router.fleet.worker import WorkerState

log = logging.getLogger(__name__)

MAX_PLACED_A_TURN = 32
"""Requests of the queue that are placed in one turn of the event loop: each takes most of a millisecond."""


class Dispatcher:
    """The `GenerationClient` over ZeroMQ. Owned by one event loop: `start`, serve, `close`."""

    def __init__(self, config: RouterConfig, *, hwm: int = CONTROL_HWM) -> None:
        self._config = config
        self._clock = time.monotonic
        self._states: dict[str, RequestState] = {}
        self._queue: dict[str, RequestState] = {}
        self._index = PrefixIndex()
        self._counters = DispatchCounters()
        self._last_max_model_len = 0
        self._open = False
        self.fleet = WorkerFleet(config, self, hwm=hwm, clock=self._clock)
        policy = RoutingPolicy(local_prefill_threshold=config.local_prefill_threshold)
        self._placement = Placement(
            self.fleet.registry,
            policy,
            self._index,
            self.fleet.send,
            self.fleet.abort,
            self._clock,
        )
        has_prefill = bool(config.prefill or config.prefill_services or config.discovery_file)
        self._demand = DemandMeter(has_prefill, config.local_prefill_threshold)
        self._recovery = Recovery(config.max_retries, self._placement, self._queue, self._counters)
        self._admission = Admission(self.fleet.registry, policy, config, self._counters)
        self._handovers = HandOvers(self.fleet.registry, self._placement, self._queue, self._counters)

    # ------------------------------------------------------------ for the front

    async def start(self) -> None:
        """Connect to the workers; returns at once. Requests wait until workers are ready."""
        await self.fleet.start()
        self._open = True

    async def close(self) -> None:
        """Fail all requests, abort them on the workers, close every socket. Takes well under a second."""
        self._open = False
        for state in list(self._states.values()):
            self._fail(state, Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S))
        await self.fleet.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `GenerationClient.generate`."""
        state, chosen = self._admit(request)
        try:
            self._try_place(state, self._clock(), chosen)
            while True:
                event = await state.next_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            self._end(state)

    def check_room(self, is_longer: Callable[[int], bool]) -> None:
        """See `GenerationClient.check_room`."""
        self._check_bounds()
        self._admission.check_unread(is_longer, self._clock())

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and what is missing: decode workers alone are enough."""
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
        """The longest sequence that all ready workers take, or took when some were last ready; 0 before."""
        self._last_max_model_len = self.fleet.registry.max_model_len() or self._last_max_model_len
        return self._last_max_model_len

    def reset_prefix_cache(self) -> None:
        """Have every worker empty its prefix cache, and clear the prefix index."""
        self._index.clear_all()
        for address in self.fleet.connections:
            self.fleet.send(address, ResetPrefixCache(request_id="reset"))

    def load(self) -> DispatchLoad:
        """Where requests are and how the workers are, in numbers."""
        states, limit_s = self._states.values(), self._admission.limit_s
        return DispatchLoad.of(states, self.fleet, self._counters, limit_s, self._clock())

    def demand(self, slo_s: float) -> Demand:
        """The load that autoscalers read; see `DemandMeter.measure`."""
        queue, workers = self._queue.values(), self.fleet.registry.workers.values()
        return self._demand.measure(self._states.values(), queue, workers, slo_s)

    # ------------------------------------------------------------ for the fleet

    def on_output(self, address: str, output: TokenOutput) -> None:
        for delta in output.outputs:
            if (match := self._match_assignment(address, output.epoch, delta)) is not None:
                self._on_delta(*match, delta)
        if self.fleet.registry.workers[address].state is WorkerState.DRAINING:  # sooner than at the next tick
            known = (self._states.get(delta.request_id) for delta in output.outputs)
            self._handovers.leave((state for state in known if state is not None), self._clock())

    def on_prompt_logprobs(self, address: str, prompt_logprobs: PromptLogprobs) -> None:
        if (match := self._match_assignment(address, prompt_logprobs.epoch, prompt_logprobs)) is None:
            return
        state, assignment = match
        try:
            state.receive_prompt_logprobs(prompt_logprobs, self._clock())
        except StreamConflict as conflict:
            self._on_conflict(state, assignment, conflict)

    def on_failed(self, address: str, failed: RequestFailed) -> None:
        state = self._states.get(failed.request_id)
        if state is None or state.done:
            return
        if state.may_give_up_handover(address, failed.attempt):
            self._give_up_handover(state, f"worker {failed.worker_id} failed in {failed.phase}: {failed.message}")
            return
        assignment = state.assignment(address, failed.attempt)
        if assignment is None or failed.attempt != assignment.attempt:
            return
        reason = f"{assignment.role} worker {failed.worker_id} failed in {failed.phase}: {failed.message}"
        if failed.retryable or state.is_through_with(assignment):
            self._recover(state, assignment, reason)
        else:
            self._fail(state, refusal(failed, reason, state.remaining_s(self._clock())))

    def on_lost(self, address: str, reason: str) -> None:
        for state in list(self._states.values()):
            for assignment in state.assignments:
                if assignment.address == address and not state.done:
                    why = f"{assignment.name} {reason}"
                    self._recover(state, assignment, why, died=True)

    def on_started(self, address: str) -> None:
        self._index.clear(address)

    def on_gone(self, address: str) -> None:
        self.on_started(address)

    def uses(self, address: str) -> bool:
        return any(state.needs(address) for state in self._states.values() if not state.done)

    def on_ready(self, address: str) -> None:
        epoch = self.fleet.registry.workers[address].epoch
        for state in self._states.values():
            state.forgive_death(address, epoch)
        self._serve_queue(self._clock())

    def on_tick(self, now: float) -> None:
        self._handovers.leave(self._states.values(), now)
        self._serve_queue(now)
        for state in list(self._states.values()):
            self._check_progress(state, now)
        self._admission.observe(self._states.values(), now)
        for state, error in self._admission.shed(self._states.values(), now):
            self._fail(state, error)

    # ------------------------------------------------------------ a request's life

    def _check_bounds(self) -> None:
        if not self._open:
            raise Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S)
        if len(self._states) >= self._config.max_inflight:
            num = self._config.max_inflight
            raise Unavailable(f"{num} requests are in flight, the most this router takes", retry_after_s=RETRY_AFTER_S)

    def _admit(self, request: GenerationRequest) -> tuple[RequestState, tuple[Choice, RequestShape] | None]:
        """The request's state, and where it would be placed."""
        self._check_bounds()
        if request.request_id in self._states:
            raise InvalidRequest(f"request {request.request_id} is already being served", param="request_id")
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        now = self._clock()
        try:
            state = RequestState(request, now)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"the prompt holds what is no token id: {error}", param="prompt") from error
        chosen = self._placement.choose(state, now)
        self._admission.check(chosen and chosen[0], now)
        self._states[request.request_id] = state
        loop = asyncio.get_running_loop()
        state.deadline_timer = loop.call_later(request.deadline_s, self._on_deadline, state)
        self._queue[request.request_id] = state
        return state, chosen

    def _serve_queue(self, now: float) -> None:
        """Place queued requests, oldest first, `MAX_PLACED_A_TURN` at once; fail those that waited too long."""
        num_placed = 0
        for state in list(self._queue.values()):
            if self._try_place(state, now):
                num_placed += 1
                if num_placed == MAX_PLACED_A_TURN:
                    asyncio.get_running_loop().call_soon(lambda: self._serve_queue(self._clock()))
                    return
                continue
            if now - state.queued_at <= self._config.queue_timeout_s:
                continue
            waited = f"waited {now - state.queued_at:.1f} s for a worker: {self._placement.obstacle(state, now)}"
            self._fail(state, Unavailable(waited, retry_after_s=RETRY_AFTER_S))

    def _try_place(self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None = None) -> bool:
        if now < state.not_before or not self._recovery.may_be_placed(state):
            return False
        if (choice := self._placement.place(state, now, chosen)) is None:
            return False
        self._admission.expect(state, choice, now)
        del self._queue[state.request.request_id]
        kind = "prefill" if state.decode is None else "remote" if state.prefill else "local"
        self._counters.num_choices[kind] += 1
        return True

    def _match_assignment(
        self, address: str, epoch: int, message: TokenDelta | PromptLogprobs
    ) -> tuple[RequestState, Assignment] | None:
        """The request and the assignment of a worker's message; None, and an abort to the worker, if it has neither."""
        worker = self.fleet.registry.workers[address]
        current = worker.hello is not None and worker.epoch == epoch
        state = self._states.get(message.request_id)
        assignment = state.assignment(address, message.attempt) if state and current and not state.done else None
        if state is not None and assignment is not None and assignment.epoch == epoch:
            return state, assignment
        self._counters.num_stale_deltas += 1
        if current:  # an earlier abort was lost
            self.fleet.abort(address, message.request_id, message.attempt)
        return None

    def _on_delta(self, state: RequestState, assignment: Assignment, delta: TokenDelta) -> None:
        first = not assignment.delivered
        if delta.finish_reason in ("abort", "moved"):
            self._on_left(state, assignment, delta.finish_reason)
            return
        if not delta.token_ids and not delta.finish_reason:
            state.renew(assignment, self._clock())
            return
        if assignment is state.successor:
            self._take_over(state, moved=False)
        now = self._clock()
        if first:
            self._admission.learn(state, assignment, now)
        try:
            state.receive(assignment, delta, now)
        except StreamConflict as conflict:
            self._on_conflict(state, assignment, conflict)
            return
        if first:
            self.fleet.registry.on_request_served(assignment.address)
            self._placement.computed(assignment)
            if assignment is state.decode:
                self._placement.remember(state, assignment)
                self._placement.spare_prefill(state)
        if state.stream.finish_reason:
            self._finish(state, assignment)
        elif state.decode is None:
            self._recover(state, assignment, f"{assignment.name} did not end a one-token request")

    def _on_left(self, state: RequestState, assignment: Assignment, how: str) -> None:
        """The worker ended a request that is not over: it goes on where it was handed over, or somewhere else."""
        if how == "moved" and assignment is state.decode and state.successor is not None:
            self._take_over(state, moved=True)
        else:
            self._recover(state, assignment, f"{assignment.name} {how} the request")

    def _on_conflict(self, state: RequestState, assignment: Assignment, conflict: StreamConflict) -> None:
        """The worker is at fault, unless it computed again what another worker had computed before."""
        what = f"{assignment.name} sent {conflict}"
        if not (isinstance(conflict, TokensDiffer) and state.may_differ):
            self._recover(state, assignment, what)
            return
        log.info("request %s starts over behind the tokens that were sent: %s", state.request.request_id, what)
        now = self._clock()
        self._recovery.continue_behind(state, assignment, now)
        if state.request.request_id in self._queue:
            self._try_place(state, now)

    def _take_over(self, state: RequestState, *, moved: bool) -> None:
        now = self._clock()
        self._handovers.succeed(state, now, moved=moved)
        self._handovers.leave(self._states.values(), now)

    def _give_up_handover(self, state: RequestState, reason: str) -> None:
        now = self._clock()
        self._handovers.fail(state, reason, now)
        self._handovers.leave(self._states.values(), now)

    def _finish(self, state: RequestState, last: Assignment) -> None:
        """The last token has come: release the workers, and abort on a decode worker that may still expect KV."""
        state.done = True
        self._placement.settle(state)
        decode = state.decode
        if last is decode:
            self._placement.remember(state, last)
            self.fleet.registry.on_request_finished(last.address, last.timeline.decode_s)
        if decode is None:
            return
        # A decode worker that got a second attempt may read of it after it ended the first, and start over.
        if last is not decode or decode.attempt > decode.first_attempt:
            self.fleet.abort(decode.address, state.request.request_id, state.attempt)
        if last is state.prefill:  # else it would offer its KV, and hold the blocks until the lease of that ends
            self.fleet.abort(last.address, state.request.request_id, state.attempt)

    def _recover(self, state: RequestState, assignment: Assignment, reason: str, *, died: bool = False) -> None:
        now = self._clock()
        if assignment is state.successor:
            self._give_up_handover(state, reason)
            return
        if self.fleet.registry.workers[assignment.address].ready and not state.is_through_with(assignment):
            self.fleet.registry.on_request_failed(assignment.address, now)
        error = self._recovery.recover(state, assignment, reason, now, died=died)
        if error is not None:
            self._fail(state, error)
        elif state.request.request_id in self._queue:
            self._try_place(state, now)

    def _check_progress(self, state: RequestState, now: float) -> None:
        """Move a request whose worker looks healthy but lost a message, or whose message was lost."""
        assignment = state.waits_for
        if state.done or assignment is None:
            return
        idle_since = self.fleet.registry.workers[assignment.address].idle_since
        if why := why_left(state, assignment, self._config, idle_since, now):
            self._recover(state, assignment, why)

    def _on_deadline(self, state: RequestState) -> None:
        if not state.done:
            allowed = f"{state.request.deadline_s:g} s"
            self._fail(state, DeadlineExceeded(f"the request's {allowed} were over in its {state.stage} phase"))

    def _fail(self, state: RequestState, error: RequestError) -> None:
        if state.done:
            return
        self._counters.num_failures[type(error).__name__] += 1
        self._queue.pop(state.request.request_id, None)
        self._placement.withdraw(state)
        state.fail(error)

    def _end(self, state: RequestState) -> None:
        """The consumer has ended, whether the request is over or not."""
        if state.deadline_timer is not None:
            state.deadline_timer.cancel()
        self._queue.pop(state.request.request_id, None)
        self._states.pop(state.request.request_id, None)
        if not state.done:
            state.done = True
            self._placement.withdraw(state)
