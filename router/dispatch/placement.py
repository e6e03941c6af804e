"""Puts a request onto workers and takes it off again: choose, book, send; release, abort.

Everything here is immediate. A worker that cannot take a message right now is passed over, and a request that finds
no worker goes back to the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from diptych.common.messages import DecodeRequest, HandOver, KVTarget, Message, PrefillRequest
from diptych.router.dispatch.flight import Assignment, Flight
from diptych.router.dispatch.policy import Choice, RequestShape, RoutingPolicy
from diptych.router.dispatch.prefix_index import PrefixIndex
from diptych.router.dispatch.registry import WorkerRegistry
from diptych.router.dispatch.worker import Booking, Worker

Send = Callable[[str, Message], bool]
Abort = Callable[[str, str, int], None]


class Placement:
    """Carries out the policy's choices. `remaining_s(flight)` is what is left of the request's time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: RoutingPolicy,
        index: PrefixIndex,
        send: Send,
        abort: Abort,
        remaining_s: Callable[[Flight], float],
    ) -> None:
        self._registry, self._policy, self._index = registry, policy, index
        self._send, self._abort, self._remaining_s = send, abort, remaining_s

    def place(self, flight: Flight, now: float) -> bool:
        """Choose workers and send them a request that is on none; False when nobody can take it now."""
        flight.num_base_tokens = len(flight.stream.token_ids)
        deaf: set[str] = set()
        while True:
            prefill, decode = self._candidates(flight, deaf)
            if not decode and flight.num_remaining > 1:
                return False  # spares the many that wait for a decode worker the hashing of their prompts
            shape = self._shape(flight, [*prefill, *decode])
            choice = self._policy.choose(prefill, decode, shape)
            if choice is None:
                return False
            unheard = self._dispatch(flight, choice, shape, now)
            if unheard is None:
                return True
            deaf.add(unheard)
            self.withdraw(flight)
            flight.attempt += 1

    def replace_prefill(self, flight: Flight, now: float) -> bool:
        """A new attempt with another prefill worker, or none, for the decode worker that stays.

        The decode worker keeps the blocks that have landed. False when it cannot be told.
        """
        decode = self._registry.workers[flight.decode.address] if flight.decode else None
        if decode is None or decode.hello is None:
            return False
        assignment = flight.decode
        if assignment is None:
            return False
        deaf: set[str] = set()
        while True:
            flight.attempt += 1
            partners, _ = self._candidates(flight, deaf)
            shape = self._shape(flight, [*partners, decode])
            prefill = self._policy.choose_prefill(partners, decode, shape)
            if not self._send(decode.address, self._decode_request(flight, prefill)):
                return False
            assignment.attempt = flight.attempt
            if prefill is None or self._send_prefill(flight, prefill, decode, shape, now):
                return True
            deaf.add(prefill.address)

    def hand_over(self, flight: Flight, target: Worker, num_reserved_tokens: int) -> bool:
        """A new attempt on `target`, which the present decode worker copies its KV to; it has room for more tokens.

        False when one of them cannot be told.
        """
        source = flight.decode
        if source is None:
            return False
        flight.attempt += 1
        num_output = len(flight.stream.token_ids)
        request = self._decode_request(flight, self._registry.workers[source.address], num_output, num_reserved_tokens)
        if not self._send(target.address, request):
            return False
        num_tokens = len(flight.request.prompt_token_ids) + num_output + num_reserved_tokens
        num_blocks = -(-num_tokens // max(1, target.identity.block_size))
        booking = self._registry.book(target.address, num_tokens=0, num_blocks=num_blocks)
        flight.successor = _assignment(flight, target, booking, num_output)
        order = HandOver(
            request_id=request.request_id,
            attempt=source.attempt,
            new_attempt=flight.attempt,
            target=_target(target),
            num_output_tokens=num_output,
            num_reserved_tokens=num_reserved_tokens,
        )
        return self._send(source.address, order)

    def leave(self, flight: Flight, assignment: Assignment, *, abort: bool) -> None:
        """A worker has no part any more in a request that goes on."""
        self._registry.release(assignment.booking)
        if abort:
            self._abort(assignment.address, flight.request.request_id, assignment.attempt)

    def computed(self, assignment: Assignment) -> None:
        """The first token came: the prompt is no longer work to be done there."""
        if assignment.role == "prefill":
            self._registry.release(assignment.booking)
        else:
            assignment.booking = self._registry.computed(assignment.booking)

    def spare_prefill(self, flight: Flight) -> None:
        """The decode worker has the KV: a prefill worker called to help after another failed need not go on."""
        helper, decode = flight.prefill, flight.decode
        if helper and decode and not helper.delivered and flight.attempt > decode.first_attempt:
            self._abort(helper.address, flight.request.request_id, flight.attempt)

    def settle(self, flight: Flight) -> None:
        """The request ended well: nothing of it is booked any more, nor need anybody take it over."""
        for assignment in (flight.prefill, flight.decode):
            if assignment is not None:
                self._registry.release(assignment.booking)
        self._drop_successor(flight)

    def remove(self, flight: Flight, assignment: Assignment) -> None:
        """Take the request off one worker, which is told to forget it."""
        self._registry.release(assignment.booking)
        self._abort(assignment.address, flight.request.request_id, flight.attempt)
        flight.unassign(assignment)

    def withdraw(self, flight: Flight) -> None:
        """Take the request off every worker."""
        for assignment in (flight.prefill, flight.decode):
            if assignment is not None:
                self.remove(flight, assignment)
        self._drop_successor(flight)

    def remember(self, flight: Flight, assignment: Assignment) -> None:
        """The worker holds the KV of the prompt (and of the output so far): count on it for later prompts."""
        worker = self._registry.workers[assignment.address]
        if worker.hello is not None and worker.epoch == assignment.epoch:
            hashes = flight.hashes(worker.identity.block_size)
            self._index.insert(worker.address, hashes, capacity=worker.identity.num_blocks)

    # ------------------------------------------------------------ inside

    def _drop_successor(self, flight: Flight) -> None:
        successor, flight.successor = flight.successor, None
        if successor is not None:
            self.leave(flight, successor, abort=True)

    def _candidates(self, flight: Flight, deaf: Collection[str]) -> tuple[list[Worker], list[Worker]]:
        """Ready prefill and decode workers that took messages so far, without those that failed this request.

        When nobody else is left, a second try in the same life of a worker is better than none. Beside a decode worker,
        which can prefill itself, a failed prefill worker is never needed again.
        """
        prefill = [worker for worker in self._registry.ready("prefill") if worker.address not in deaf]
        decode = [worker for worker in self._registry.ready("decode") if worker.address not in deaf]
        spared = [worker for worker in prefill if (worker.address, worker.epoch) not in flight.failed_lives]
        others = [worker for worker in decode if (worker.address, worker.epoch) not in flight.failed_lives]
        return (spared if decode else spared or prefill), (others or decode)

    def _shape(self, flight: Flight, workers: Sequence[Worker]) -> RequestShape:
        num_tokens = len(flight.request.prompt_token_ids) + flight.num_base_tokens
        num_remaining = flight.request.params.max_tokens - flight.num_base_tokens
        if flight.is_scored:  # what is cached has no logits
            return RequestShape(num_tokens, num_remaining, {}, alone=True)
        known = [worker for worker in workers if self._index.size(worker.address)]
        hashes = {size: flight.hashes(size) for size in {worker.identity.block_size for worker in known}}
        hits = {
            worker.address: size * self._index.num_hits(worker.address, hashes[size])
            for worker in known
            if (size := worker.identity.block_size)
        }
        return RequestShape(num_tokens, num_remaining, hits)

    def _dispatch(self, flight: Flight, choice: Choice, shape: RequestShape, now: float) -> str | None:
        """Send a choice out. The address of the worker that could not take its message, or None when all is sent."""
        if choice.decode is not None:
            if not self._send(choice.decode.address, self._decode_request(flight, choice.prefill)):
                return choice.decode.address
            self._assign(flight, choice.decode, shape, local=choice.local, now=now)
        if choice.prefill is not None and not self._send_prefill(flight, choice.prefill, choice.decode, shape, now):
            return choice.prefill.address
        return None

    def _send_prefill(
        self, flight: Flight, prefill: Worker, decode: Worker | None, shape: RequestShape, now: float
    ) -> bool:
        if not self._send(prefill.address, self._prefill_request(flight, decode)):
            return False
        self._assign(flight, prefill, shape, local=True, now=now)
        hello = prefill.identity
        self._index.insert(prefill.address, flight.hashes(hello.block_size), capacity=hello.num_blocks)
        return True

    def _assign(self, flight: Flight, worker: Worker, shape: RequestShape, *, local: bool, now: float) -> None:
        """Book the worker: `local` says that it computes the prompt itself."""
        num_tokens = shape.uncached(worker) if local else 0
        num_blocks = -(-shape.uncached(worker) // max(1, worker.identity.block_size))
        booking = self._registry.book(worker.address, num_tokens=num_tokens, num_blocks=num_blocks)
        flight.assigned(_assignment(flight, worker, booking, flight.num_base_tokens), now)

    def _decode_request(
        self, flight: Flight, source: Worker | None, num_output: int | None = None, num_reserved: int = 0
    ) -> DecodeRequest:
        """`source` computes its KV, or has it; `num_output` of the output tokens, else the attempt's, are known."""
        request = flight.request
        num_output = flight.num_base_tokens if num_output is None else num_output
        return DecodeRequest(
            request_id=request.request_id,
            attempt=flight.attempt,
            prompt=flight.packed_prompt(num_output),
            params=request.params,
            prefill_worker=source.worker_id if source else "",
            num_output_tokens=num_output,
            cache_salt=request.cache_salt,
            deadline_s=self._remaining_s(flight),
            traceparent=request.traceparent,
            num_reserved_tokens=num_reserved,
        )

    def _prefill_request(self, flight: Flight, decode: Worker | None) -> PrefillRequest:
        request = flight.request
        return PrefillRequest(
            request_id=request.request_id,
            attempt=flight.attempt,
            prompt=flight.packed_prompt(flight.num_base_tokens),
            params=request.params,
            decode=_target(decode) if decode is not None else None,
            num_output_tokens=flight.num_base_tokens,
            cache_salt=request.cache_salt,
            deadline_s=self._remaining_s(flight),
            traceparent=request.traceparent,
        )


def _target(decode: Worker) -> KVTarget:
    hello = decode.identity
    return KVTarget(hello.worker_id, hello.epoch, hello.kv_address)


def _assignment(flight: Flight, worker: Worker, booking: Booking, num_base_tokens: int) -> Assignment:
    """Of the present attempt."""
    attempt = flight.attempt
    return Assignment(
        worker.role, worker.address, worker.worker_id, worker.epoch, attempt, booking, attempt, num_base_tokens
    )
