"""Puts a request onto workers and takes it off again: choose, book, send; release, abort.

Everything here is immediate. A worker that cannot take a message right now is passed over, and a request that finds
no worker goes back to the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from common.wire.message_fields import Role
from common.wire.messages import DecodeRequest, HandOver, KVTarget, Message, PrefillRequest
from router.dispatch.policy import Choice, RequestShape, RoutingPolicy
from router.dispatch.request_state import Assignment, RequestState
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Booking, Worker, WorkerState

Send = Callable[[str, Message], bool]
Abort = Callable[[str, str, int], None]


class Placement:
    """Carries out the policy's choices. `remaining_s(state)` is what is left of the request's time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: RoutingPolicy,
        index: PrefixIndex,
        send: Send,
        abort: Abort,
        remaining_s: Callable[[RequestState], float],
    ) -> None:
        self._registry, self._policy, self._index = registry, policy, index
        self._send, self._abort, self._remaining_s = send, abort, remaining_s

    def place(self, state: RequestState, now: float) -> bool:
        """Choose workers and send them a request that is on none; False when nobody can take it now."""
        state.num_base_tokens = len(state.stream.token_ids)
        if state.wants_prompt_logprobs:  # all of them come from one worker: another may have other weights
            state.stream.drop_prompt_logprobs()
        deaf: set[str] = set()
        while True:
            prefill, decode = self._candidates(state, deaf)
            if not decode and state.num_remaining > 1:
                return False  # spares the many that wait for a decode worker the hashing of their prompts
            shape = self._shape(state, [*prefill, *decode])
            choice = self._policy.choose(prefill, decode, shape)
            if choice is None:
                return False
            unheard = self._dispatch(state, choice, shape, now)
            if unheard is None:
                return True
            deaf.add(unheard)
            self.withdraw(state)
            state.begin_attempt()

    def replace_prefill(self, state: RequestState, now: float) -> bool:
        """A new attempt with another prefill worker, or none, for the decode worker that stays.

        The decode worker keeps the blocks that have arrived. False when it cannot be told.
        """
        assignment = state.decode
        decode = self._registry.workers[assignment.address] if assignment else None
        if assignment is None or decode is None or decode.state is not WorkerState.READY:
            return False  # one that drains refuses attempts that are new
        deaf: set[str] = set()
        while True:
            state.begin_attempt()
            partners, _ = self._candidates(state, deaf)
            shape = self._shape(state, [*partners, decode])
            prefill = self._policy.choose_prefill(partners, decode, shape)
            if not self._send(decode.address, self._decode_request(state, prefill)):
                return False
            assignment.attempt = state.attempt
            if prefill is None or self._send_prefill(state, prefill, decode, shape, now):
                return True
            deaf.add(prefill.address)

    def hand_over(self, state: RequestState, target: Worker, num_reserved_tokens: int) -> bool:
        """A new attempt on `target`, which the present decode worker copies its KV to; it has room for more tokens.

        False when one of them cannot be told.
        """
        source = state.decode
        if source is None:
            return False
        state.begin_attempt()
        num_output = len(state.stream.token_ids)
        request = self._decode_request(state, self._registry.workers[source.address], num_output, num_reserved_tokens)
        if not self._send(target.address, request):
            return False
        num_tokens = len(state.request.prompt_token_ids) + num_output + num_reserved_tokens
        num_blocks = -(-num_tokens // max(1, target.identity.block_size))
        booking = self._registry.book(target.address, num_tokens=0, num_blocks=num_blocks)
        state.successor = _assignment(state, target, booking, num_output)
        order = HandOver(
            request_id=request.request_id,
            attempt=source.attempt,
            new_attempt=state.attempt,
            target=_target(target),
            num_output_tokens=num_output,
            num_reserved_tokens=num_reserved_tokens,
        )
        return self._send(source.address, order)

    def leave(self, state: RequestState, assignment: Assignment, *, abort: bool) -> None:
        """A worker has no part any more in a request that goes on."""
        self._registry.release(assignment.booking)
        if abort:
            self._abort(assignment.address, state.request.request_id, assignment.attempt)

    def computed(self, assignment: Assignment) -> None:
        """The first token came: the prompt is no longer work to be done there."""
        if assignment.role == "prefill":
            self._registry.release(assignment.booking)
        else:
            assignment.booking = self._registry.computed(assignment.booking)

    def spare_prefill(self, state: RequestState) -> None:
        """The decode worker has the KV: a prefill worker called to help after another failed need not go on."""
        helper, decode = state.prefill, state.decode
        if helper and decode and not helper.delivered and state.attempt > decode.first_attempt:
            self._abort(helper.address, state.request.request_id, state.attempt)

    def settle(self, state: RequestState) -> None:
        """The request ended well: nothing of it is booked any more, nor need anybody take it over."""
        for assignment in (state.prefill, state.decode):
            if assignment is not None:
                self._registry.release(assignment.booking)
        self._drop_successor(state)

    def remove(self, state: RequestState, assignment: Assignment) -> None:
        """Take the request off one worker, which is told to forget it."""
        self._registry.release(assignment.booking)
        self._abort(assignment.address, state.request.request_id, state.attempt)
        state.unassign(assignment)

    def withdraw(self, state: RequestState) -> None:
        """Take the request off every worker."""
        for assignment in (state.prefill, state.decode):
            if assignment is not None:
                self.remove(state, assignment)
        self._drop_successor(state)

    def remember(self, state: RequestState, assignment: Assignment) -> None:
        """The worker holds the KV of the prompt (and of the output so far): count on it for later prompts."""
        worker = self._registry.workers[assignment.address]
        if worker.hello is not None and worker.epoch == assignment.epoch:
            hashes = state.hashes(worker.identity.block_size)
            self._index.insert(worker.address, hashes, capacity=worker.identity.num_blocks)

    def usable(self, role: Role, state: RequestState) -> list[Worker]:
        """Ready workers that take what there is of the request, and have the weights that its answer began with.

        A prefill worker also ends an answer that becomes too long for it by its first token.
        """
        num_new = 1 if role == "decode" else min(2, state.num_remaining)
        num_tokens = len(state.request.prompt_token_ids) + len(state.stream.token_ids) + num_new
        return [
            worker
            for worker in self._registry.ready(role)
            if worker.max_tokens >= num_tokens and state.weights in (None, worker.identity.weights)
        ]

    def obstacle(self, state: RequestState, now: float) -> str:
        """Why the request is still not placed."""
        ready = self._registry.ready("decode")
        if not ready or self.usable("decode", state):
            missing = self._registry.missing("decode", now)
            return state.last_failure or missing or "workers take no messages"
        same = [worker for worker in ready if state.weights in (None, worker.identity.weights)]
        if not same:
            return "its answer began with weights that no ready decode worker has"
        num_tokens = len(state.request.prompt_token_ids) + len(state.stream.token_ids)
        most = max(worker.max_tokens for worker in same)
        return f"it has {num_tokens} tokens, and ready decode workers take {most}, the next one included"

    # ------------------------------------------------------------ inside

    def _drop_successor(self, state: RequestState) -> None:
        successor, state.successor = state.successor, None
        if successor is not None:
            self.leave(state, successor, abort=True)

    def _candidates(self, state: RequestState, deaf: Collection[str]) -> tuple[list[Worker], list[Worker]]:
        """Usable prefill and decode workers that took messages so far, without those that failed this request.

        When nobody else is left, a second try in the same life of a worker is better than none. Beside a decode worker,
        which can prefill itself, a failed prefill worker is never needed again.
        """
        prefill = [worker for worker in self.usable("prefill", state) if worker.address not in deaf]
        decode = [worker for worker in self.usable("decode", state) if worker.address not in deaf]
        spared = [worker for worker in prefill if (worker.address, worker.epoch) not in state.failed_lives]
        others = [worker for worker in decode if (worker.address, worker.epoch) not in state.failed_lives]
        return (spared if decode else spared or prefill), (others or decode)

    def _shape(self, state: RequestState, workers: Sequence[Worker]) -> RequestShape:
        num_tokens = len(state.request.prompt_token_ids) + state.num_base_tokens
        num_remaining = state.request.params.max_tokens - state.num_base_tokens
        if state.wants_prompt_logprobs:  # what is cached has no logits
            return RequestShape(num_tokens, num_remaining, {}, alone=True)
        known = [worker for worker in workers if self._index.size(worker.address)]
        hashes = {size: state.hashes(size) for size in {worker.identity.block_size for worker in known}}
        hits = {
            worker.address: size * self._index.num_hits(worker.address, hashes[size])
            for worker in known
            if (size := worker.identity.block_size)
        }
        return RequestShape(num_tokens, num_remaining, hits)

    def _dispatch(self, state: RequestState, choice: Choice, shape: RequestShape, now: float) -> str | None:
        """Send a choice out. The address of the worker that could not take its message, or None when all is sent."""
        if choice.decode is not None:
            if not self._send(choice.decode.address, self._decode_request(state, choice.prefill)):
                return choice.decode.address
            self._assign(state, choice.decode, shape, local=choice.local, now=now)
        if choice.prefill is not None and not self._send_prefill(state, choice.prefill, choice.decode, shape, now):
            return choice.prefill.address
        return None

    def _send_prefill(
        self, state: RequestState, prefill: Worker, decode: Worker | None, shape: RequestShape, now: float
    ) -> bool:
        if not self._send(prefill.address, self._prefill_request(state, decode)):
            return False
        self._assign(state, prefill, shape, local=True, now=now)
        hello = prefill.identity
        self._index.insert(prefill.address, state.hashes(hello.block_size), capacity=hello.num_blocks)
        return True

    def _assign(self, state: RequestState, worker: Worker, shape: RequestShape, *, local: bool, now: float) -> None:
        """Book the worker: `local` says that it computes the prompt itself."""
        num_tokens = shape.uncached(worker) if local else 0
        num_blocks = -(-shape.uncached(worker) // max(1, worker.identity.block_size))
        booking = self._registry.book(worker.address, num_tokens=num_tokens, num_blocks=num_blocks)
        state.assigned(_assignment(state, worker, booking, state.num_base_tokens), now)

    def _decode_request(
        self, state: RequestState, source: Worker | None, num_output: int | None = None, num_reserved: int = 0
    ) -> DecodeRequest:
        """`source` computes its KV, or has it; `num_output` of the output tokens, else the attempt's, are known."""
        request = state.request
        num_output = state.num_base_tokens if num_output is None else num_output
        return DecodeRequest(
            request_id=request.request_id,
            attempt=state.attempt,
            prompt=state.packed_prompt(num_output),
            params=request.params,
            prefill_worker=source.worker_id if source else "",
            num_output_tokens=num_output,
            cache_salt=request.cache_salt,
            deadline_s=self._remaining_s(state),
            traceparent=request.traceparent,
            num_reserved_tokens=num_reserved,
        )

    def _prefill_request(self, state: RequestState, decode: Worker | None) -> PrefillRequest:
        request = state.request
        return PrefillRequest(
            request_id=request.request_id,
            attempt=state.attempt,
            prompt=state.packed_prompt(state.num_base_tokens),
            params=request.params,
            decode=_target(decode) if decode is not None else None,
            num_output_tokens=state.num_base_tokens,
            cache_salt=request.cache_salt,
            deadline_s=self._remaining_s(state),
            traceparent=request.traceparent,
        )


def _target(decode: Worker) -> KVTarget:
    hello = decode.identity
    return KVTarget(hello.worker_id, hello.epoch, hello.kv_address)


def _assignment(state: RequestState, worker: Worker, booking: Booking, num_base_tokens: int) -> Assignment:
    """Of the present attempt."""
    return Assignment(
        role=worker.role,
        address=worker.address,
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        first_attempt=state.attempt,
        booking=booking,
        attempt=state.attempt,
        num_base_tokens=num_base_tokens,
        weights=worker.identity.weights,
    )
