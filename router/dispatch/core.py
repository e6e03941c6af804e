"""Request dispatch as a synchronous state machine: events and `now` in, actions out. No I/O, clock or asyncio.

    submit ─> waiting ─> placed on P and D ─> first token (P) ─> tokens (D) ─> finished
               ^          │ P lost before D delivered: next attempt, same D, another P or none
               └──────────┘ D lost: next attempt anywhere, the output so far becomes part of the prompt

Worker messages, lost workers, timers and ticks change a `RequestState`. Then its consumer is woken and takes the next
event. `Dispatcher` executes the actions in a process, the simulator in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, DeadlineExceeded, InvalidRequest, Overloaded, RequestError, Unavailable
from common.wire.messages import PromptResult, RequestFailed, TokenDelta, TokenOutput
from router.dispatch.admission import Admission
from router.dispatch.balancer import Balancer
from router.dispatch.client import ANYONE, Caller, GenerationRequest
from router.dispatch.growth import BookingResizer
from router.dispatch.handover import HandOverOrders
from router.dispatch.load import Demand, DemandMeter, DispatchCounters
from router.dispatch.placement import Abort, Placement, Send
from router.dispatch.prompt import PromptHashCache
from router.dispatch.recovery import Recovery, refusal
from router.dispatch.request_scheduler import Cancel, Later, RequestScheduler
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.role_changes import RoleChanges
from router.dispatch.silence import SilenceDetector
from router.dispatch.stream import StreamConflict, TokensDiffer
from router.dispatch.waiting import OUTPUT_WEIGHT, HeldPrompts, WaitingRequests
from router.dispatch.waits import Decoding
from router.fleet import PrefixIndex, WorkerRegistry, WorkerState
from router.policy import Choice, GuardedPolicy, Policy, RequestShape, RoutingPolicy, SplitForecaster, load_policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Actions:
    """Actions that the core requests from its owner. They must neither block nor call the core.

    `send` and `abort` are those of a worker connection. `later(delay_s, then)` calls `then(now)` after the delay unless
    cancelled; a delay of 0 yields to other work first. `wake(request_id)` notifies the consumer that
    `RequestState.take_event` has a new event.
    """

    send: Send
    abort: Abort
    later: Later
    wake: Callable[[str], None]


class DispatchCore:
    """All requests of one router over the workers of `registry`. Not thread-safe.

    `states` maps ids to requests between `submit` and `end`. `waiting` contains those that are on no worker.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        index: PrefixIndex,
        actions: Actions,
        policy: Policy | None = None,
        splits: SplitForecaster | None = None,
        has_prefill: bool = True,
    ) -> None:
        """Without `policy`, the configured policy is used. For `splits` and `has_prefill` see `Dispatcher`."""
        self._config, self._registry, self._index, self._actions = config, registry, index, actions
        self.states: dict[str, RequestState] = {}
        self.waiting, self.counters = WaitingRequests(), DispatchCounters()
        self._deadlines: dict[str, Cancel] = {}
        if policy is None:
            policy = load_policy(config.routing_policy, config.local_prefill_threshold, Random(registry.router_id))
        if type(policy) is not RoutingPolicy:
            policy = GuardedPolicy(policy, self._on_policy_error)
        self.policy = policy
        self._placement = Placement(registry, policy, self._index, actions.send, actions.abort)
        self.has_prefill = has_prefill and bool(config.prefill or config.prefill_services or config.discovery_file)
        self._demand = DemandMeter(self.has_prefill, config.local_prefill_threshold)
        self._recovery = Recovery(config.max_retries, self._placement, self.waiting, self.counters)
        self._resizer = BookingResizer(registry, self._placement.lengths)
        self._decoding, self._hash_cache, self._silence = Decoding(), PromptHashCache(), SilenceDetector(config)
        held_prompts = self._held = HeldPrompts(registry, self.waiting)
        self._admission = Admission(registry, policy, config, self.counters, held_prompts, self._placement.shortlist)
        self._scheduler = RequestScheduler(
            config,
            registry,
            self.waiting,
            self._placement,
            self._recovery,
            self._admission,
            held_prompts,
            self.counters,
            actions.later,
            self._fail,
        )
        self._handovers = HandOverOrders(registry, self._placement, self.waiting, self.counters)
        self._balancer = Balancer(
            registry,
            self._placement,
            self._handovers,
            self.counters,
            least_tpot_s=min((one.tpot_s for one in config.classes.values() if one.tpot_s > 0), default=0.0),
        )
        self._roles = RoleChanges(config, registry, actions.send, registry.router_id, self.counters, splits)

    # ------------------------------------------------------------ for the API layer

    def submit(self, request: GenerationRequest, now: float) -> RequestState:
        """Admit a request, and place it if a worker can take it now. The consumer must call `end`.

        Raises InvalidRequest, Overloaded or Unavailable if the request is not admitted.
        """
        state, chosen = self._admit(request, now)
        try:
            self._scheduler.place_new(state, now, chosen)
        except BaseException:
            self.end(state)
            raise
        return state

    def end(self, state: RequestState) -> None:
        """Remove a request after its consumer ended. Aborts the request if it is still running."""
        self._deadlines.pop(state.request.request_id, _nothing)()
        self.waiting.discard(state)
        self._decoding.discard(state)
        self._silence.discard(state)
        if self.states.pop(state.request.request_id, None) is not None:
            self.waiting.charge(state, OUTPUT_WEIGHT * len(state.stream.token_ids))
        if not state.done:
            state.done = True
            self._placement.withdraw(state)

    def close(self) -> None:
        """Fail all requests and abort them on the workers."""
        self._scheduler.close()
        for state in list(self.states.values()):
            self._fail(state, Unavailable("The router is shutting down.", retry_after_s=RETRY_AFTER_S))

    def check_room(self, is_longer: Callable[[int], bool], now: float, caller: Caller = ANYONE) -> None:
        """See `GenerationClient.check_room`."""
        self._check_bounds()
        try:
            self._admission.check_unread(is_longer, now, caller)
        except Overloaded:
            self._roles.turned_away(now)
            raise

    def abort_all(self, now: float) -> None:
        """End all requests with the finish reason "abort". Their answers have the tokens so far."""
        for state in list(self.states.values()):
            if not state.done:
                self.waiting.discard(state)
                self._decoding.discard(state)
                self._silence.discard(state)
                self._placement.withdraw(state)
                if state.pools or (state.wants_prompt_logprobs and not state.stream.token_ids):
                    state.fail(Unavailable("The request was aborted by an operator.", retry_after_s=RETRY_AFTER_S))
                else:
                    state.abort()
                self._actions.wake(state.request.request_id)
        self._scheduler.room_expected(now)

    def forget_prefixes(self) -> None:
        """Clear the prefix index, because all workers clear their prefix caches."""
        self._index.clear_all()

    @property
    def wait_limits_s(self) -> Mapping[str, float]:
        """Maximum wait of a new request by class, in seconds."""
        return self._admission.limits_s

    def demand(self, slo_s: float, now: float) -> Demand:
        """Return the load that autoscalers read; see `DemandMeter.measure`."""
        workers, prefilled_per_s = self._registry.workers.values(), self._registry.prefilled_tokens.per_s(now)
        return self._demand.measure(self.states.values(), self.waiting, workers, slo_s, prefilled_per_s)

    # ------------------------------------------------------------ worker events

    def on_output(self, address: str, output: TokenOutput, now: float) -> None:
        for delta in output.outputs:
            if (match := self._match_assignment(address, output.epoch, delta)) is not None:
                self._on_delta(*match, delta, now)
        if self._registry.workers[address].state is WorkerState.DRAINING:  # do not wait for the next tick
            known = (self.states.get(delta.request_id) for delta in output.outputs)
            self._handovers.leave((state for state in known if state is not None), now)

    def on_prompt_result(self, address: str, result: PromptResult, now: float) -> None:
        if (match := self._match_assignment(address, result.epoch, result)) is None:
            return
        state, assignment = match
        try:
            state.receive_prompt_result(result, now)
        except StreamConflict as conflict:
            self._on_conflict(state, assignment, conflict, now)

    def on_failed(self, address: str, failed: RequestFailed, now: float) -> None:
        state = self.states.get(failed.request_id)
        if state is None or state.done:
            return
        if state.attempts.may_give_up_handover(address, failed.attempt):
            self._give_up_handover(state, f"worker {failed.worker_id} failed in {failed.phase}: {failed.message}", now)
            return
        assignment = state.attempts.of(address, failed.attempt)
        if assignment is None or failed.attempt != assignment.attempt:
            return
        reason = f"{assignment.role} worker {failed.worker_id} failed in {failed.phase}: {failed.message}"
        if failed.retryable or state.attempts.is_through_with(assignment):
            self._recover(state, assignment, reason, now)
        else:
            self._fail(state, refusal(failed, reason, state.times.remaining_s(now)))

    def on_lost(self, address: str, reason: str, now: float) -> None:
        for state in list(self.states.values()):
            for assignment in state.attempts.all:
                if assignment.address == address and not state.done:
                    why = f"{assignment.name} was lost: {reason}"
                    self._recover(state, assignment, why, now, died=True)

    def uses(self, address: str) -> bool:
        return any(state.needs(address) for state in self.states.values() if not state.done)

    def on_ready(self, address: str, now: float) -> None:
        epoch = self._registry.workers[address].epoch
        for state in self.states.values():
            state.attempts.forgive_death(address, epoch)
        self._scheduler.serve(now)

    def on_tick(self, now: float) -> None:
        self._resizer.tick(self.states.values())
        self._handovers.leave(self.states.values(), now)
        if self._config.balance_decode:
            self._balancer.tick(self.states, now)
        self._scheduler.serve(now)
        for state, assignment, why in self._silence.silent(self.states, self._registry.workers, now):
            self._recover(state, assignment, why, now)
        self._decoding.look()
        self._admission.observe(self._decoding, now)
        self._scheduler.revoke_overdue(self._decoding.open, now)
        for state, error in self._admission.shed(self._decoding.open, now):
            self._fail(state, error)
        self._roles.tick(now, len(self.waiting))

    # ------------------------------------------------------------ request lifecycle

    def _check_bounds(self, num_new: int = 1) -> None:
        if len(self.states) + num_new > self._config.max_inflight:
            limit = f"--max-inflight {self._config.max_inflight}"
            why = f"{len(self.states)} requests are in flight; {num_new} more would exceed {limit}."
            raise Unavailable(why, retry_after_s=RETRY_AFTER_S)

    def _admit(self, request: GenerationRequest, now: float) -> tuple[RequestState, tuple[Choice, RequestShape] | None]:
        """Return the state of an admitted request, and where it would be placed."""
        if not request.continues:
            self._check_bounds(request.num_at_once)
        if request.request_id in self.states:
            raise InvalidRequest(f"Request {request.request_id} is already being served.", param="request_id")
        if not request.prompt_token_ids:
            raise InvalidRequest("The prompt has no tokens.", param="prompt")
        try:
            state = RequestState(request, now, self._hash_cache)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"Invalid token id in the prompt: {error}", param="prompt") from error
        request_class = self._admission.class_of(request)
        held_s = self._held.before_s(request_class, request.key, state.num_tokens, now)
        chosen = self._placement.choose(state, now, held_s=held_s)
        choice, shape = chosen or (None, None)
        num_cached = max(shape.hits.values(), default=0) if shape else 0
        self._roles.arrived(state.num_tokens, num_cached, state.num_remaining, now)
        num_expected = shape.num_expected if shape else 0
        if not request.continues:
            state.admitted = self._admission.check(
                choice, now, request_class, request.key, state.num_tokens, num_expected
            )
        state.note(now, "accepted")
        self.states[request.request_id] = state
        self._decoding.add(state)
        self._silence.add(state)
        deadline = self._actions.later(request.deadline_s, lambda _: self._on_deadline(state))
        self._deadlines[request.request_id] = deadline
        self.waiting.add(state, now)
        return state, chosen

    def _match_assignment(
        self, address: str, epoch: int, message: TokenDelta | PromptResult
    ) -> tuple[RequestState, Assignment] | None:
        """Return the request and assignment of a worker's message.

        If there is none, abort on the worker and return None.
        """
        worker = self._registry.workers[address]
        current = worker.hello is not None and worker.epoch == epoch
        state = self.states.get(message.request_id)
        assignment = state.attempts.of(address, message.attempt) if state and current and not state.done else None
        if state is not None and assignment is not None and assignment.epoch == epoch:
            return state, assignment
        self.counters.num_stale_deltas += 1
        if current:  # an earlier abort was lost
            self._actions.abort(address, message.request_id, message.attempt)
        return None

    def _on_delta(self, state: RequestState, assignment: Assignment, delta: TokenDelta, now: float) -> None:
        first = not assignment.delivered
        if delta.finish_reason in ("abort", "moved"):
            self._on_left(state, assignment, delta.finish_reason, now)
            return
        if not delta.token_ids and not delta.finish_reason:
            state.renew(assignment, now)
            return
        if assignment is state.attempts.successor:
            self._take_over(state, now, moved=False)
        if first:
            self._admission.learn(state, assignment, now)
        try:
            grew = state.receive(assignment, delta, now)
        except StreamConflict as conflict:
            self._on_conflict(state, assignment, conflict, now)
            return
        if grew:
            self._actions.wake(state.request.request_id)
        if first:
            state.note(now, "token", assignment.name)
            self._registry.on_request_served(assignment.address)
            self._placement.computed(assignment, now)
            self._scheduler.room_expected(now)
            if assignment is state.attempts.decode:
                self._placement.remember(state, assignment, now)
                self._placement.spare_prefill(state)
        if state.stream.finish_reason:
            self._finish(state, assignment, now)
        elif state.attempts.decode is None:
            self._recover(state, assignment, f"{assignment.name} did not end a one-token request", now)

    def _on_left(self, state: RequestState, assignment: Assignment, how: str, now: float) -> None:
        """Process a "moved" or "abort" from a worker: continue on the hand-over target, or recover."""
        if how == "moved" and assignment is state.attempts.decode and state.attempts.successor is not None:
            self._take_over(state, now, moved=True)
        else:
            self._recover(state, assignment, f"{assignment.name} {how} the request", now)

    def _on_conflict(self, state: RequestState, assignment: Assignment, conflict: StreamConflict, now: float) -> None:
        """Recover from conflicting tokens. Blames the worker unless it recomputed what another worker had computed."""
        what = f"{assignment.name} sent {conflict}"
        if not (isinstance(conflict, TokensDiffer) and state.attempts.may_differ):
            self._recover(state, assignment, what, now)
            return
        log.info("request %s: restarting after the tokens already sent: %s", state.request.request_id, what)
        self._recovery.continue_behind(state, assignment, now)
        if state in self.waiting:
            self._scheduler.try_place(state, now)

    def _take_over(self, state: RequestState, now: float, *, moved: bool) -> None:
        self._handovers.succeed(state, now, moved=moved)
        self._handovers.leave(self.states.values(), now)

    def _give_up_handover(self, state: RequestState, reason: str, now: float) -> None:
        self._handovers.fail(state, reason, now)
        self._handovers.leave(self.states.values(), now)

    def _finish(self, state: RequestState, last: Assignment, now: float) -> None:
        """Release the workers after the last token. Aborts on a decode worker that may still expect KV."""
        state.done = True
        self._decoding.discard(state)
        self._silence.discard(state)
        self._placement.settle(state)
        if not state.request.continues:
            self._roles.ended(len(state.request.prompt_token_ids), len(state.stream.token_ids))
        self._scheduler.room_expected(now)
        decode = state.attempts.decode
        if last is decode:
            self._placement.remember(state, last, now)
        if last is decode and state.request.is_representative:
            num_later, predicted_s = len(state.stream.token_ids) - 1, state.forecast.model_token_s
            if state.attempts.num_failures or last.num_base_tokens:
                num_later = 0  # `decode_s` covers only the tokens of the last worker
            self._registry.on_request_finished(last.address, last.timeline.decode_s, num_later, predicted_s)
        if decode is None:
            return
        # The decode worker may read a second attempt only after it ended the first, and would start it.
        if last is not decode or decode.attempt > decode.first_attempt:
            self._actions.abort(decode.address, state.request.request_id, state.attempts.number)
        if last is state.attempts.prefill:  # it would offer its KV and hold the blocks until the lease expires
            self._actions.abort(last.address, state.request.request_id, state.attempts.number)

    def _recover(
        self, state: RequestState, assignment: Assignment, reason: str, now: float, *, died: bool = False
    ) -> None:
        if assignment is state.attempts.successor:
            self._give_up_handover(state, reason, now)
            return
        is_moving = state.attempts.successor is not None  # preempted before the hand-over order arrived
        worker = self._registry.workers[assignment.address]
        if worker.ready and not is_moving and not state.attempts.is_through_with(assignment):
            self._registry.on_request_failed(assignment.address, now)
        error = self._recovery.recover(state, assignment, reason, now, died=died)
        if error is not None:
            self._fail(state, error)
        elif state in self.waiting:
            self._scheduler.try_place(state, now)

    def _on_policy_error(self) -> None:
        self.counters.num_policy_errors += 1

    def _on_deadline(self, state: RequestState) -> None:
        if not state.done:
            why = f"The request exceeded its deadline of {state.request.deadline_s:g} s in its {state.stage} phase."
            self._fail(state, DeadlineExceeded(why))

    def _fail(self, state: RequestState, error: RequestError) -> None:
        if state.done:
            return
        self.counters.num_failures[type(error).__name__] += 1
        self.waiting.discard(state)
        self._decoding.discard(state)
        self._silence.discard(state)
        self._placement.withdraw(state)
        state.fail(error)
        self._actions.wake(state.request.request_id)


def _nothing() -> None:
    """Default for a missing deadline timer."""
