"""Where requests run, when they move and when they end: events and `now` in, actions out. No I/O, no clock, no asyncio.

    submit ─> waiting ─> placed on P and D ─> first token (P) ─> tokens (D) ─> finished
               ^          │ P lost before D delivered: next attempt, same D, another P or none
               └──────────┘ D lost: next attempt anywhere, the output so far becomes part of the prompt

Nothing here waits. Workers' messages, lost workers, timers and ticks change a `RequestState`; its consumer is woken and
takes the next event. A process (`Dispatcher`) or a simulation in virtual time carries the actions out.
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
from router.dispatch.growth import Growth
from router.dispatch.handover import HandOverOrders
from router.dispatch.load import Demand, DemandMeter, DispatchCounters
from router.dispatch.placement import Abort, Placement, Send
from router.dispatch.prompt import KnownHashes
from router.dispatch.recovery import Recovery, refusal
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.role_changes import RoleChanges
from router.dispatch.silence import QuietRequests
from router.dispatch.stream import StreamConflict, TokensDiffer
from router.dispatch.turns import Cancel, Later, Turns
from router.dispatch.waiting import OUTPUT_WEIGHT, Holding, WaitingRequests
from router.dispatch.waits import Decoding
from router.fleet import PrefixIndex, WorkerRegistry, WorkerState
from router.policy import Choice, GuardedPolicy, Policy, RequestShape, RoutingPolicy, SplitForecaster, load_policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Actions:
    """What the core asks its owner to do. None of these waits, and none calls the core back before it returns.

    `send` and `abort` are those of a connection to a worker. `later` calls back after so many seconds, with the time
    that it is then, unless it is cancelled; 0 seconds let other work have a turn first. `wake` tells the consumer of a
    request, by its id, that `RequestState.take_event` has something new.
    """

    send: Send
    abort: Abort
    later: Later
    wake: Callable[[str], None]


class DispatchCore:
    """One router's requests, over the workers of `registry`. Owned by one thread.

    `states` has every request between `submit` and `end`, by id; `waiting` those of them that are on no worker.
    `policy` chooses their workers.
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
        """Without a `policy`, that of the configuration routes. `splits` and `has_prefill`: see `Dispatcher`."""
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
        self._growth = Growth(registry, self._placement.lengths)
        self._decoding, self._known_hashes, self._quiet = Decoding(), KnownHashes(), QuietRequests(config)
        holding = self._holding = Holding(registry, self.waiting)
        self._admission = Admission(registry, policy, config, self.counters, holding, self._placement.shortlist)
        self._turns = Turns(
            config,
            registry,
            self.waiting,
            self._placement,
            self._recovery,
            self._admission,
            holding,
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

    # ------------------------------------------------------------ for the front

    def submit(self, request: GenerationRequest, now: float) -> RequestState:
        """Admit a request, and place it if a worker takes it now. Its consumer must `end` it.

        Raises InvalidRequest, Overloaded or Unavailable for a request that is not admitted.
        """
        state, chosen = self._admit(request, now)
        try:
            self._turns.place_new(state, now, chosen)
        except BaseException:
            self.end(state)
            raise
        return state

    def end(self, state: RequestState) -> None:
        """The consumer has ended, whether the request is over or not."""
        self._deadlines.pop(state.request.request_id, _nothing)()
        self.waiting.discard(state)
        self._decoding.discard(state)
        self._quiet.discard(state)
        if self.states.pop(state.request.request_id, None) is not None:
            self.waiting.charge(state, OUTPUT_WEIGHT * len(state.stream.token_ids))
        if not state.done:
            state.done = True
            self._placement.withdraw(state)

    def close(self) -> None:
        """Fail all requests and abort them on the workers."""
        self._turns.close()
        for state in list(self.states.values()):
            self._fail(state, Unavailable("the router is shutting down", retry_after_s=RETRY_AFTER_S))

    def check_room(self, is_longer: Callable[[int], bool], now: float, caller: Caller = ANYONE) -> None:
        """See `GenerationClient.check_room`."""
        self._check_bounds()
        try:
            self._admission.check_unread(is_longer, now, caller)
        except Overloaded:
            self._roles.turned_away(now)
            raise

    def forget_prefixes(self) -> None:
        """Every worker empties its prefix cache."""
        self._index.clear_all()

    @property
    def wait_limits_s(self) -> Mapping[str, float]:
        """How long a new request of each class may wait now, in seconds."""
        return self._admission.limits_s

    def demand(self, slo_s: float) -> Demand:
        """The load that autoscalers read; see `DemandMeter.measure`."""
        workers = self._registry.workers.values()
        return self._demand.measure(self.states.values(), self.waiting, workers, slo_s)

    # ------------------------------------------------------------ what happens to workers

    def on_output(self, address: str, output: TokenOutput, now: float) -> None:
        for delta in output.outputs:
            if (match := self._match_assignment(address, output.epoch, delta)) is not None:
                self._on_delta(*match, delta, now)
        if self._registry.workers[address].state is WorkerState.DRAINING:  # sooner than at the next tick
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
                    why = f"{assignment.name} {reason}"
                    self._recover(state, assignment, why, now, died=True)

    def uses(self, address: str) -> bool:
        return any(state.needs(address) for state in self.states.values() if not state.done)

    def on_ready(self, address: str, now: float) -> None:
        epoch = self._registry.workers[address].epoch
        for state in self.states.values():
            state.attempts.forgive_death(address, epoch)
        self._turns.serve(now)

    def on_tick(self, now: float) -> None:
        self._growth.tick(self.states.values())
        self._handovers.leave(self.states.values(), now)
        if self._config.balance_decode:
            self._balancer.tick(self.states, now)
        self._turns.serve(now)
        for state, assignment, why in self._quiet.silent(self.states, self._registry.workers, now):
            self._recover(state, assignment, why, now)
        self._decoding.look()
        self._admission.observe(self._decoding, now)
        self._turns.take_back(self._decoding.open, now)
        for state, error in self._admission.shed(self._decoding.open, now):
            self._fail(state, error)
        self._roles.tick(now, len(self.waiting))

    # ------------------------------------------------------------ a request's life

    def _check_bounds(self, num_new: int = 1) -> None:
        if len(self.states) + num_new > self._config.max_inflight:
            why = f"{len(self.states)} requests are in flight; {num_new} more would exceed {self._config.max_inflight}"
            raise Unavailable(why, retry_after_s=RETRY_AFTER_S)

    def _admit(self, request: GenerationRequest, now: float) -> tuple[RequestState, tuple[Choice, RequestShape] | None]:
        """The request's state, and where it would be placed."""
        if not request.continues:
            self._check_bounds(request.num_at_once)
        if request.request_id in self.states:
            raise InvalidRequest(f"request {request.request_id} is already being served", param="request_id")
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        try:
            state = RequestState(request, now, self._known_hashes)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"the prompt holds what is no token id: {error}", param="prompt") from error
        request_class = self._admission.class_of(request)
        held_s = self._holding.before_s(request_class, request.key, state.num_tokens)
        chosen = self._placement.choose(state, now, held_s=held_s)
        choice, shape = chosen or (None, None)
        num_cached = max(shape.hits.values(), default=0) if shape else 0
        self._roles.arrived(state.num_tokens, num_cached, state.num_remaining, now)
        num_expected = shape.num_expected if shape else 0
        if not request.continues:
            self._admission.check(choice, now, request_class, request.key, state.num_tokens, num_expected)
        self.states[request.request_id] = state
        self._decoding.add(state)
        self._quiet.add(state)
        deadline = self._actions.later(request.deadline_s, lambda _: self._on_deadline(state))
        self._deadlines[request.request_id] = deadline
        self.waiting.add(state, now)
        return state, chosen

    def _match_assignment(
        self, address: str, epoch: int, message: TokenDelta | PromptResult
    ) -> tuple[RequestState, Assignment] | None:
        """The request and the assignment of a worker's message; None, and an abort to the worker, if it has neither."""
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
            self._registry.on_request_served(assignment.address)
            self._placement.computed(assignment, now)
            self._turns.room_expected(now)
            if assignment is state.attempts.decode:
                self._placement.remember(state, assignment, now)
                self._placement.spare_prefill(state)
        if state.stream.finish_reason:
            self._finish(state, assignment, now)
        elif state.attempts.decode is None:
            self._recover(state, assignment, f"{assignment.name} did not end a one-token request", now)

    def _on_left(self, state: RequestState, assignment: Assignment, how: str, now: float) -> None:
        """The worker ended a request that is not over: it goes on where it was handed over, or somewhere else."""
        if how == "moved" and assignment is state.attempts.decode and state.attempts.successor is not None:
            self._take_over(state, now, moved=True)
        else:
            self._recover(state, assignment, f"{assignment.name} {how} the request", now)

    def _on_conflict(self, state: RequestState, assignment: Assignment, conflict: StreamConflict, now: float) -> None:
        """The worker is at fault, unless it computed again what another worker had computed before."""
        what = f"{assignment.name} sent {conflict}"
        if not (isinstance(conflict, TokensDiffer) and state.attempts.may_differ):
            self._recover(state, assignment, what, now)
            return
        log.info("request %s starts over behind the tokens that were sent: %s", state.request.request_id, what)
        self._recovery.continue_behind(state, assignment, now)
        if state in self.waiting:
            self._turns.try_place(state, now)

    def _take_over(self, state: RequestState, now: float, *, moved: bool) -> None:
        self._handovers.succeed(state, now, moved=moved)
        self._handovers.leave(self.states.values(), now)

    def _give_up_handover(self, state: RequestState, reason: str, now: float) -> None:
        self._handovers.fail(state, reason, now)
        self._handovers.leave(self.states.values(), now)

    def _finish(self, state: RequestState, last: Assignment, now: float) -> None:
        """The last token has come: release the workers, and abort on a decode worker that may still expect KV."""
        state.done = True
        self._decoding.discard(state)
        self._quiet.discard(state)
        self._placement.settle(state)
        self._roles.ended(len(state.request.prompt_token_ids), len(state.stream.token_ids))
        self._turns.room_expected(now)
        decode = state.attempts.decode
        if last is decode:
            self._placement.remember(state, last, now)
            num_later, predicted_s = len(state.stream.token_ids) - 1, state.forecast.model_token_s
            self._registry.on_request_finished(
                last.address, last.timeline.decode_s, 0 if state.attempts.num_failures else num_later, predicted_s
            )
        if decode is None:
            return
        # A decode worker may read of a second attempt only after it has ended the first: it would start over.
        if last is not decode or decode.attempt > decode.first_attempt:
            self._actions.abort(decode.address, state.request.request_id, state.attempts.number)
        if (
            last is state.attempts.prefill
        ):  # else it would offer its KV, and hold the blocks until the lease of that ends
            self._actions.abort(last.address, state.request.request_id, state.attempts.number)

    def _recover(
        self, state: RequestState, assignment: Assignment, reason: str, now: float, *, died: bool = False
    ) -> None:
        if assignment is state.attempts.successor:
            self._give_up_handover(state, reason, now)
            return
        is_moving = state.attempts.successor is not None  # it was preempted before the order to hand it over came
        worker = self._registry.workers[assignment.address]
        if worker.ready and not is_moving and not state.attempts.is_through_with(assignment):
            self._registry.on_request_failed(assignment.address, now)
        error = self._recovery.recover(state, assignment, reason, now, died=died)
        if error is not None:
            self._fail(state, error)
        elif state in self.waiting:
            self._turns.try_place(state, now)

    def _on_policy_error(self) -> None:
        self.counters.num_policy_errors += 1

    def _on_deadline(self, state: RequestState) -> None:
        if not state.done:
            allowed = f"{state.request.deadline_s:g} s"
            self._fail(state, DeadlineExceeded(f"the request's {allowed} were over in its {state.stage} phase"))

    def _fail(self, state: RequestState, error: RequestError) -> None:
        if state.done:
            return
        self.counters.num_failures[type(error).__name__] += 1
        self.waiting.discard(state)
        self._decoding.discard(state)
        self._quiet.discard(state)
        self._placement.withdraw(state)
        state.fail(error)
        self._actions.wake(state.request.request_id)


def _nothing() -> None:
    """The deadline of a request that has none."""
