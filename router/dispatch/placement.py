"""Places requests on workers: finds candidates, chooses, books and sends; releases and aborts. Never blocks.

A worker that cannot receive a message now is skipped. A request that finds no worker stays in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from common.latency import StepShape
from common.wire import Role
from common.wire.messages import DecodeRequest, HandOver, KVTarget, Message, PrefillRequest
from router.dispatch.fetches import FetchPlanner, Hits
from router.dispatch.growth import num_more_blocks
from router.dispatch.request_state import Assignment, RequestState
from router.fleet import Booking, PrefixIndex, Worker, WorkerRegistry, WorkerState
from router.policy import NO_HITS, Choice, Fetch, OutputLengths, Policy, RequestShape, Shortlist


class Candidates:
    """Finds the workers that are considered for a request: all ready ones, or a shortlist in a large pool."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex, shortlist: Shortlist) -> None:
        self._registry, self._index, self._shortlist = registry, index, shortlist

    def usable(self, role: Role, state: RequestState) -> list[Worker]:
        """Return ready workers that can hold the request so far and have the weights with which its answer began.

        A prefill worker needs capacity for up to two more tokens, none for a pooled prompt.
        """
        accept = _accepting(role, state)
        return [worker for worker in self._registry.ready(role) if accept(worker)]

    def of(self, state: RequestState, unreachable: Collection[str], hits: Hits) -> tuple[list[Worker], list[Worker]]:
        """Return usable prefill and decode workers, without `unreachable` ones and those that failed this request.

        If no other worker is left, a failed one is tried again. A failed prefill worker is not, if there is a decode
        worker, which can compute the prompt.
        """
        decode = [] if state.pools else self._weighed("decode", state, unreachable, hits)
        prefill = self._weighed("prefill", state, unreachable, hits)
        if not state.attempts.failed_incarnations:
            return prefill, decode
        spared = [
            worker for worker in prefill if (worker.address, worker.epoch) not in state.attempts.failed_incarnations
        ]
        others = [
            worker for worker in decode if (worker.address, worker.epoch) not in state.attempts.failed_incarnations
        ]
        return (spared if decode else spared or prefill), (others or decode)

    def _weighed(self, role: Role, state: RequestState, unreachable: Collection[str], hits: Hits) -> list[Worker]:
        """Return all usable workers of a role, or the most promising of many."""
        if not self._shortlist.is_needed:
            return [worker for worker in self.usable(role, state) if worker.address not in unreachable]
        accept = _accepting(role, state, unreachable)
        if state.attempts.failed_incarnations:
            others = self._shortlist.workers(role, _sparing(accept, state.attempts.failed_incarnations), hits)
            if others:
                return others
        return self._shortlist.workers(role, accept, hits)

    def may_decode(self, state: RequestState, unreachable: Collection[str]) -> bool:
        """Return whether any decode worker can take the request. Not checked in a large pool."""
        if self._shortlist.is_needed:
            return self._shortlist.has_ready("decode")
        accept, workers = _accepting("decode", state, unreachable), self._registry.workers.values()
        return any(worker.role == "decode" and worker.ready and accept(worker) for worker in workers)

    def hits(self, state: RequestState) -> Hits:
        """Return the cached blocks of the prompt on each worker, by block size."""
        if state.computes_all or self._index.is_empty:
            return {}
        windows = self._shortlist.windows
        return {size: self._index.hits(state.hashes(size), window) for size, window in windows.items()}


def _accepting(role: Role, state: RequestState, unreachable: Collection[str] = ()) -> Callable[[Worker], bool]:
    """Return a check for capacity for the request so far, the weights of its answer, and its adapter."""
    more = 0 if state.pools else 1 if role == "decode" else min(2, state.num_remaining)
    num_tokens = state.num_tokens + more
    weights, adapter = state.weights, state.request.adapter

    def accept(worker: Worker) -> bool:
        if worker.max_tokens < num_tokens or (unreachable and worker.address in unreachable):
            return False
        if adapter and adapter not in worker.load.digests:
            return False
        return weights is None or weights == worker.identity.weights

    return accept


def _sparing(accept: Callable[[Worker], bool], lives: Collection[tuple[str, int]]) -> Callable[[Worker], bool]:
    """Return `accept` restricted to workers whose current incarnation has not failed the request."""
    return lambda worker: accept(worker) and (worker.address, worker.epoch) not in lives


def decode_request(
    state: RequestState,
    source: Worker | None,
    now: float,
    *,
    serial: int,
    num_output: int | None = None,
    num_reserved: int = 0,
    fetch: Fetch | None = None,
) -> DecodeRequest:
    """Build the order for a decode worker, booked as `serial`. The worker `source` computes or has the KV.

    `num_output`: output tokens in the prompt, by default those of the attempt. Without `source`, blocks come from
    `fetch`.
    """
    request = state.request
    num_output = state.attempts.num_base_tokens if num_output is None else num_output
    return DecodeRequest(
        request_id=request.request_id,
        attempt=state.attempts.number,
        prompt=state.packed_prompt(num_output),
        params=request.params,
        prefill_worker=source.worker_id if source else "",
        num_output_tokens=num_output,
        cache_salt=request.cache_salt,
        deadline_s=state.times.remaining_s(now),
        ttft_s=state.times.first_token_s(now),
        traceparent=request.traceparent,
        num_reserved_tokens=num_reserved,
        serial=serial,
        tpot_s=request.tpot_s,
        priority=request.priority,
        adapter=request.adapter,
        peer=fetch.peer if fetch is not None else None,
    )


def prefill_request(
    state: RequestState, decode: Worker | None, now: float, *, serial: int, fetch: Fetch | None = None
) -> PrefillRequest:
    """Build the order for a prefill worker, booked as `serial`. KV goes to `decode`; None: only a first token."""
    request = state.request
    return PrefillRequest(
        request_id=request.request_id,
        attempt=state.attempts.number,
        prompt=state.packed_prompt(state.attempts.num_base_tokens),
        params=request.params,
        decode=kv_target(decode) if decode is not None else None,
        num_output_tokens=state.attempts.num_base_tokens,
        cache_salt=request.cache_salt,
        deadline_s=state.times.remaining_s(now),
        ttft_s=state.times.first_token_s(now),
        traceparent=request.traceparent,
        serial=serial,
        tpot_s=request.tpot_s,
        priority=request.priority,
        adapter=request.adapter,
        peer=fetch.peer if fetch is not None else None,
    )


def kv_target(decode: Worker) -> KVTarget:
    """Return the address at which a decode worker receives KV."""
    hello = decode.identity
    return KVTarget(hello.worker_id, hello.epoch, hello.kv_address)


Send = Callable[[str, Message], bool]
Abort = Callable[[str, str, int], None]


class Placement:
    """Chooses workers for requests by policy, books them and sends the orders."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: Policy,
        index: PrefixIndex,
        send: Send,
        abort: Abort,
    ) -> None:
        self._registry, self._policy, self._index = registry, policy, index
        self._send, self._abort = send, abort
        self.shortlist = Shortlist(registry, index, weighs_all=policy.weighs_all)
        self.candidates = Candidates(registry, index, self.shortlist)
        self.lengths = OutputLengths()
        self._fetches = FetchPlanner(registry, index)

    def choose(
        self, state: RequestState, now: float, unreachable: Collection[str] = (), held_s: float = 0.0
    ) -> tuple[Choice, RequestShape] | None:
        """Return where the request would be placed now without the workers `unreachable`, or None if nowhere.

        `held_s`: seconds of other held prompts for each prefill worker.
        """
        if state.num_remaining > 1 and not self.candidates.may_decode(state, unreachable):
            return None  # before the prompt is hashed: many requests may wait for a decode worker
        hits = self.candidates.hits(state)
        prefill, decode = self.candidates.of(state, unreachable, hits)
        shape = self._shape(state, [*prefill, *decode], hits, now, held_s)
        choice = self._policy.choose(prefill, decode, shape, now)
        return None if choice is None else (choice, shape)

    def place(
        self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None = None
    ) -> Choice | None:
        """Choose workers for an unplaced request and send the orders. Return None if no worker can take it now.

        `chosen` is the result of a `choose` just before.
        """
        state.attempts.num_base_tokens = len(state.stream.token_ids)
        if state.wants_prompt_logprobs:  # from one worker only: another may have other weights
            state.stream.drop_prompt_logprobs()
        unreachable: set[str] = set()
        while (chosen := chosen or self.choose(state, now, unreachable)) is not None:
            (choice, shape), chosen = chosen, None
            unheard = self._dispatch(state, choice, shape, now)
            if unheard is None:
                state.forecast = choice.forecast
                return choice
            unreachable.add(unheard)
            self.start_over(state)
        return None

    def replace_prefill(self, state: RequestState, now: float) -> bool:
        """Start a new attempt with another prefill worker, or none, on the same decode worker.

        The decode worker keeps the blocks that it has received. Returns False if it cannot receive the message.
        """
        assignment = state.attempts.decode
        decode = self._registry.workers[assignment.address] if assignment else None
        if assignment is None or decode is None or decode.state is not WorkerState.READY:
            return False  # a draining worker rejects new attempts
        unreachable: set[str] = set()
        while True:
            state.attempts.begin()
            hits = self.candidates.hits(state)
            partners, _ = self.candidates.of(state, unreachable, hits)
            shape = self._shape(state, [*partners, decode], hits, now)
            prefill = self._policy.choose_prefill(partners, decode, shape, now)
            request = decode_request(state, prefill, now, serial=assignment.booking.serial)
            if not self._send(decode.address, request):
                return False
            assignment.attempt = state.attempts.number
            if prefill is None or self._send_prefill(state, prefill, decode, shape, now):
                return True
            unreachable.add(prefill.address)

    def hand_over(self, state: RequestState, target: Worker, num_reserved_tokens: int, now: float) -> bool:
        """Start a new attempt on `target`, to which the current decode worker copies its KV.

        `target` reserves blocks for `num_reserved_tokens` more tokens. Returns False if either cannot receive its
        message.
        """
        source = state.attempts.decode
        if source is None:
            return False
        state.attempts.begin()
        num_output = len(state.stream.token_ids)
        worker = self._registry.workers[source.address]
        serial, num_reserved = self._registry.next_serial, num_reserved_tokens
        request = decode_request(state, worker, now, serial=serial, num_output=num_output, num_reserved=num_reserved)
        if not self._send(target.address, request):
            return False
        num_tokens = state.num_tokens + num_reserved_tokens
        num_expected = max(0, self.expected_more(state) - num_reserved_tokens)
        booking = self._registry.book(
            target.address,
            now,
            prompt=StepShape(),
            num_blocks=target.num_blocks_of(num_tokens),
            priority=state.request.priority,
            num_tokens=num_tokens,
            num_more=num_more_blocks(target, num_tokens, num_expected),
        )
        state.attempts.successor = _assignment(state, target, booking, num_output)
        order = HandOver(
            request_id=request.request_id,
            attempt=source.attempt,
            new_attempt=state.attempts.number,
            target=kv_target(target),
            num_output_tokens=num_output,
            num_reserved_tokens=num_reserved_tokens,
        )
        return self._send(source.address, order)

    def leave(self, state: RequestState, assignment: Assignment, *, abort: bool) -> None:
        """Release one worker of a request that continues elsewhere."""
        self._registry.release(assignment.booking)
        if abort:
            self._abort(assignment.address, state.request.request_id, assignment.attempt)

    def computed(self, assignment: Assignment, now: float) -> None:
        """Remove the prompt from the worker's booked load after its first token."""
        assignment.booking = self._registry.computed(assignment.booking, now)
        if assignment.role == "prefill":
            self._registry.release(assignment.booking)

    def spare_prefill(self, state: RequestState) -> None:
        """Release and abort a replacement prefill worker whose KV the decode worker already has."""
        helper, decode = state.attempts.prefill, state.attempts.decode
        if helper and decode and not helper.delivered and state.attempts.number > decode.first_attempt:
            self._registry.release(helper.booking)
            self._abort(helper.address, state.request.request_id, state.attempts.number)

    def settle(self, state: RequestState) -> None:
        """Release the bookings of a completed request, and cancel its hand-over."""
        if not state.pools and state.request.is_representative:
            self.lengths.observe(state.request.request_class, len(state.stream.token_ids))
        for assignment in (state.attempts.prefill, state.attempts.decode):
            if assignment is not None:
                self._registry.release(assignment.booking)
        self._drop_successor(state)

    def remove(self, state: RequestState, assignment: Assignment) -> None:
        """Remove the request from one worker."""
        self._registry.release(assignment.booking)
        self._abort(assignment.address, state.request.request_id, state.attempts.number)
        state.unassign(assignment)

    def withdraw(self, state: RequestState) -> None:
        """Remove the request from all workers."""
        for assignment in (state.attempts.prefill, state.attempts.decode):
            if assignment is not None:
                self.remove(state, assignment)
        self._drop_successor(state)

    def start_over(self, state: RequestState) -> None:
        """Remove the request from all workers and start a new attempt."""
        self.withdraw(state)
        state.attempts.begin()

    def remember(self, state: RequestState, assignment: Assignment, now: float) -> None:
        """Expect prefix hits on the worker, which has the KV of all tokens so far except the last."""
        worker = self._registry.workers[assignment.address]
        if worker.hello is not None and worker.epoch == assignment.epoch:
            size = worker.identity.block_size
            hashes = state.hashes(size)[: (state.num_tokens - 1) // size]
            self._expect(worker, hashes, now)

    def expected_more(self, state: RequestState) -> int:
        """Return the predicted number of further output tokens."""
        num_output = len(state.stream.token_ids)
        return self.lengths.expected_more(state.request.request_class, num_output, state.num_remaining)

    def obstacle(self, state: RequestState, now: float) -> str:
        """Return why the request has not been placed yet."""
        role: Role = "prefill" if state.pools else "decode"
        ready = self._registry.ready(role)
        if not ready or self.candidates.usable(role, state):
            missing = self._registry.missing(role, now)
            return state.attempts.last_failure or missing or "no worker can receive messages"
        if (adapter := state.request.adapter) and not any(adapter in worker.load.digests for worker in ready):
            return f"no ready {role} worker has loaded its adapter"
        same = [worker for worker in ready if state.weights in (None, worker.identity.weights)]
        if not same:
            return f"no ready {role} worker has the weights with which its answer began"
        most = max(worker.max_tokens for worker in same)
        included = "" if state.pools else ", including the next one"
        return f"it has {state.num_tokens} tokens, but ready {role} workers accept at most {most}{included}"

    # ------------------------------------------------------------ inside

    def _drop_successor(self, state: RequestState) -> None:
        successor, state.attempts.successor = state.attempts.successor, None
        if successor is not None:
            self.leave(state, successor, abort=True)

    def _shape(
        self, state: RequestState, workers: Sequence[Worker], hits: Hits, now: float, held_s: float = 0.0
    ) -> RequestShape:
        num_remaining = state.request.params.max_tokens - state.attempts.num_base_tokens
        known = {size: held for size, held in hits.items() if held}
        tokens = {}
        for worker in workers if known else ():
            size, address = worker.identity.block_size, worker.address
            if size in known and (num_blocks := known[size].num_blocks(address)):
                tokens[address] = size * num_blocks
        return RequestShape(
            len(state.request.prompt_token_ids) + state.attempts.num_base_tokens,
            num_remaining,
            tokens or NO_HITS,
            alone=state.wants_prompt_logprobs,
            num_expected=self.lengths.expected_more(
                state.request.request_class, state.attempts.num_base_tokens, num_remaining
            ),
            priority=state.request.priority,
            held_s=held_s,
            ttft_s=state.times.first_token_s(now),
            tpot_s=state.request.tpot_s,
            fetches=self._fetches.plan(state, workers, known, now) if known else None,
        )

    def _dispatch(self, state: RequestState, choice: Choice, shape: RequestShape, now: float) -> str | None:
        """Send the orders of a choice. Return the address of a worker that could not receive its order, or None."""
        if choice.decode is not None:
            fetch = shape.fetch(choice.decode) if choice.local else None
            request = decode_request(state, choice.prefill, now, serial=self._registry.next_serial, fetch=fetch)
            if not self._send(choice.decode.address, request):
                return choice.decode.address
            self._fetches.begin(fetch, now)
            self._assign(state, choice.decode, shape, local=choice.local, now=now)
        if choice.prefill is not None and not self._send_prefill(state, choice.prefill, choice.decode, shape, now):
            return choice.prefill.address
        return None

    def _send_prefill(
        self, state: RequestState, prefill: Worker, decode: Worker | None, shape: RequestShape, now: float
    ) -> bool:
        fetch = shape.fetch(prefill)
        request = prefill_request(state, decode, now, serial=self._registry.next_serial, fetch=fetch)
        if not self._send(prefill.address, request):
            return False
        self._fetches.begin(fetch, now)
        self._assign(state, prefill, shape, local=True, now=now)
        self._expect(prefill, state.hashes(prefill.identity.block_size), now)
        return True

    def _expect(self, worker: Worker, hashes: Sequence[bytes], now: float) -> None:
        """Expect the worker to report these blocks soon. With a window, only the last ones that fit."""
        num_blocks = worker.identity.num_blocks
        kept = hashes[-num_blocks:] if worker.identity.window else hashes
        self._index.expect(worker.address, kept, now, capacity=num_blocks)

    def _assign(self, state: RequestState, worker: Worker, shape: RequestShape, *, local: bool, now: float) -> None:
        """Book the worker. With `local` it computes the prompt itself."""
        num_blocks = worker.num_blocks_of(shape.uncached(worker))
        prompt = shape.prompt(worker) if local else StepShape()
        booking = self._registry.book(
            worker.address,
            now,
            prompt=prompt,
            num_blocks=num_blocks,
            priority=state.request.priority,
            num_tokens=shape.num_tokens,
            num_more=num_more_blocks(worker, shape.num_tokens, shape.num_expected) if worker.role == "decode" else 0,
        )
        state.assign(_assignment(state, worker, booking, state.attempts.num_base_tokens), now)


def _assignment(state: RequestState, worker: Worker, booking: Booking, num_base_tokens: int) -> Assignment:
    """Create the assignment of a worker from the current attempt on."""
    return Assignment(
        role=worker.role,
        address=worker.address,
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        first_attempt=state.attempts.number,
        booking=booking,
        attempt=state.attempts.number,
        num_base_tokens=num_base_tokens,
        weights=worker.identity.weights,
        weight_version=worker.identity.weight_version,
    )
