"""Puts a request onto workers and takes it off again: find candidates, choose, book, send; release, abort.

Nothing here waits. A worker that cannot take a message now is passed over, and a request that finds no worker stays in
the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from common.latency import StepShape
from common.wire import Role
from common.wire.messages import DecodeRequest, HandOver, KVTarget, Message, PrefillRequest
from router.dispatch.fetches import Fetches, Hits
from router.dispatch.growth import num_more_blocks
from router.dispatch.request_state import Assignment, RequestState
from router.fleet import Booking, PrefixIndex, Worker, WorkerRegistry, WorkerState
from router.policy import NO_HITS, Choice, Fetch, OutputLengths, Policy, RequestShape, Shortlist


class Candidates:
    """Finds the workers among which a request's place is chosen: all ready ones, or of many a shortlist."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex, shortlist: Shortlist) -> None:
        self._registry, self._index, self._shortlist = registry, index, shortlist

    def usable(self, role: Role, state: RequestState) -> list[Worker]:
        """Ready workers with room for the request so far, and with the weights that its answer began with.

        A prefill worker needs room for two more tokens, if the answer may have them; for none if the prompt is pooled.
        """
        accept = _accepting(role, state)
        return [worker for worker in self._registry.ready(role) if accept(worker)]

    def of(self, state: RequestState, deaf: Collection[str], hits: Hits) -> tuple[list[Worker], list[Worker]]:
        """Usable prefill and decode workers to weigh, without `deaf` ones and those that failed this request.

        When no other worker is left, one that failed gets a second chance. A failed prefill worker gets none beside a
        decode worker, which can prefill itself.
        """
        decode = [] if state.pools else self._weighed("decode", state, deaf, hits)
        prefill = self._weighed("prefill", state, deaf, hits)
        if not state.attempts.failed_lives:
            return prefill, decode
        spared = [worker for worker in prefill if (worker.address, worker.epoch) not in state.attempts.failed_lives]
        others = [worker for worker in decode if (worker.address, worker.epoch) not in state.attempts.failed_lives]
        return (spared if decode else spared or prefill), (others or decode)

    def _weighed(self, role: Role, state: RequestState, deaf: Collection[str], hits: Hits) -> list[Worker]:
        """All usable workers of a role, or out of many those that are worth a look."""
        if not self._shortlist.is_needed:
            return [worker for worker in self.usable(role, state) if worker.address not in deaf]
        accept = _accepting(role, state, deaf)
        if state.attempts.failed_lives:
            others = self._shortlist.workers(role, _sparing(accept, state.attempts.failed_lives), hits)
            if others:
                return others
        return self._shortlist.workers(role, accept, hits)

    def may_decode(self, state: RequestState, deaf: Collection[str]) -> bool:
        """Whether a decode worker can take the request at all; of many none is asked yet."""
        if self._shortlist.is_needed:
            return self._shortlist.has_ready("decode")
        accept, workers = _accepting("decode", state, deaf), self._registry.workers.values()
        return any(worker.role == "decode" and worker.ready and accept(worker) for worker in workers)

    def hits(self, state: RequestState) -> Hits:
        """What workers hold of the prompt, by size of a block."""
        if state.computes_all or self._index.is_empty:
            return {}
        windows = self._shortlist.windows
        return {size: self._index.hits(state.hashes(size), window) for size, window in windows.items()}


def _accepting(role: Role, state: RequestState, deaf: Collection[str] = ()) -> Callable[[Worker], bool]:
    """Whether a worker has room for the request so far, the weights that its answer began with, and its adapter."""
    more = 0 if state.pools else 1 if role == "decode" else min(2, state.num_remaining)
    num_tokens = state.num_tokens + more
    weights, adapter = state.weights, state.request.adapter

    def accept(worker: Worker) -> bool:
        if worker.max_tokens < num_tokens or (deaf and worker.address in deaf):
            return False
        if adapter and adapter not in worker.load.digests:
            return False
        return weights is None or weights == worker.identity.weights

    return accept


def _sparing(accept: Callable[[Worker], bool], lives: Collection[tuple[str, int]]) -> Callable[[Worker], bool]:
    """What `accept` says, but False for a worker whose present life failed the request."""
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
    """The order for a decode worker, booked as `serial`; the worker `source` computes or has the KV.

    `num_output`: output tokens in the prompt, by default the attempt's. Without `source` it takes `fetch` of it.
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
    """The order for a prefill worker, booked as `serial`. `decode` gets the KV; None wants a first token alone."""
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
    """Where a decode worker takes KV."""
    hello = decode.identity
    return KVTarget(hello.worker_id, hello.epoch, hello.kv_address)


Send = Callable[[str, Message], bool]
Abort = Callable[[str, str, int], None]


class Placement:
    """Chooses, books and tells the workers of a request, as the policy says."""

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
        self._fetches = Fetches(registry, index)

    def choose(
        self, state: RequestState, now: float, deaf: Collection[str] = (), held_s: float = 0.0
    ) -> tuple[Choice, RequestShape] | None:
        """Where a request would be placed now if it were on no worker, without the workers `deaf`; None: nowhere.

        Prompts that the router holds take `held_s` seconds of each prefill worker before it.
        """
        if state.num_remaining > 1 and not self.candidates.may_decode(state, deaf):
            return None  # before the prompt is hashed: many may wait for a decode worker
        hits = self.candidates.hits(state)
        prefill, decode = self.candidates.of(state, deaf, hits)
        shape = self._shape(state, [*prefill, *decode], hits, now, held_s)
        choice = self._policy.choose(prefill, decode, shape, now)
        return None if choice is None else (choice, shape)

    def place(
        self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None = None
    ) -> Choice | None:
        """Choose workers and send them a request that is on none; None when no worker can take it now.

        `chosen` is what `choose` has just said.
        """
        state.attempts.num_base_tokens = len(state.stream.token_ids)
        if state.wants_prompt_logprobs:  # one worker computes all of them: another may have other weights
            state.stream.drop_prompt_logprobs()
        deaf: set[str] = set()
        while (chosen := chosen or self.choose(state, now, deaf)) is not None:
            (choice, shape), chosen = chosen, None
            unheard = self._dispatch(state, choice, shape, now)
            if unheard is None:
                state.forecast = choice.forecast
                return choice
            deaf.add(unheard)
            self.start_over(state)
        return None

    def replace_prefill(self, state: RequestState, now: float) -> bool:
        """Begin a new attempt with another prefill worker, or none, on the decode worker that stays.

        The decode worker keeps the blocks that have arrived. False when it cannot take the message.
        """
        assignment = state.attempts.decode
        decode = self._registry.workers[assignment.address] if assignment else None
        if assignment is None or decode is None or decode.state is not WorkerState.READY:
            return False  # a draining worker refuses new attempts
        deaf: set[str] = set()
        while True:
            state.attempts.begin()
            hits = self.candidates.hits(state)
            partners, _ = self.candidates.of(state, deaf, hits)
            shape = self._shape(state, [*partners, decode], hits, now)
            prefill = self._policy.choose_prefill(partners, decode, shape, now)
            request = decode_request(state, prefill, now, serial=assignment.booking.serial)
            if not self._send(decode.address, request):
                return False
            assignment.attempt = state.attempts.number
            if prefill is None or self._send_prefill(state, prefill, decode, shape, now):
                return True
            deaf.add(prefill.address)

    def hand_over(self, state: RequestState, target: Worker, num_reserved_tokens: int, now: float) -> bool:
        """Begin a new attempt on `target`, to which the present decode worker copies its KV.

        `target` sets blocks aside for `num_reserved_tokens` more. False when one of the two cannot take its message.
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
        """End one worker's part in a request that goes on elsewhere."""
        self._registry.release(assignment.booking)
        if abort:
            self._abort(assignment.address, state.request.request_id, assignment.attempt)

    def computed(self, assignment: Assignment, now: float) -> None:
        """The worker's first token came: take the prompt off its load."""
        assignment.booking = self._registry.computed(assignment.booking, now)
        if assignment.role == "prefill":
            self._registry.release(assignment.booking)

    def spare_prefill(self, state: RequestState) -> None:
        """The decode worker has the KV: abort a replacement prefill worker that is still computing it."""
        helper, decode = state.attempts.prefill, state.attempts.decode
        if helper and decode and not helper.delivered and state.attempts.number > decode.first_attempt:
            self._abort(helper.address, state.request.request_id, state.attempts.number)

    def settle(self, state: RequestState) -> None:
        """The request ended well: release its bookings, and stop a hand-over."""
        if not state.pools:
            self.lengths.observe(state.request.request_class, len(state.stream.token_ids))
        for assignment in (state.attempts.prefill, state.attempts.decode):
            if assignment is not None:
                self._registry.release(assignment.booking)
        self._drop_successor(state)

    def remove(self, state: RequestState, assignment: Assignment) -> None:
        """Take the request off one worker."""
        self._registry.release(assignment.booking)
        self._abort(assignment.address, state.request.request_id, state.attempts.number)
        state.unassign(assignment)

    def withdraw(self, state: RequestState) -> None:
        """Take the request off every worker."""
        for assignment in (state.attempts.prefill, state.attempts.decode):
            if assignment is not None:
                self.remove(state, assignment)
        self._drop_successor(state)

    def start_over(self, state: RequestState) -> None:
        """Take the request off every worker and begin a new attempt."""
        self.withdraw(state)
        state.attempts.begin()

    def remember(self, state: RequestState, assignment: Assignment, now: float) -> None:
        """The worker holds the KV of all tokens so far but the last: expect later prompts to hit it."""
        worker = self._registry.workers[assignment.address]
        if worker.hello is not None and worker.epoch == assignment.epoch:
            size = worker.identity.block_size
            hashes = state.hashes(size)[: (state.num_tokens - 1) // size]
            self._expect(worker, hashes, now)

    def expected_more(self, state: RequestState) -> int:
        """Tokens that the answer will probably have beyond those of now."""
        num_output = len(state.stream.token_ids)
        return self.lengths.expected_more(state.request.request_class, num_output, state.num_remaining)

    def obstacle(self, state: RequestState, now: float) -> str:
        """Why the request has no place yet."""
        role: Role = "prefill" if state.pools else "decode"
        ready = self._registry.ready(role)
        if not ready or self.candidates.usable(role, state):
            missing = self._registry.missing(role, now)
            return state.attempts.last_failure or missing or "workers take no messages"
        if (adapter := state.request.adapter) and not any(adapter in worker.load.digests for worker in ready):
            return f"no ready {role} worker has its adapter"
        same = [worker for worker in ready if state.weights in (None, worker.identity.weights)]
        if not same:
            return f"its answer began with weights that no ready {role} worker has"
        most = max(worker.max_tokens for worker in same)
        included = "" if state.pools else ", the next one included"
        return f"it has {state.num_tokens} tokens, and ready {role} workers take {most}{included}"

    # ------------------------------------------------------------ inside

    def _drop_successor(self, state: RequestState) -> None:
        successor, state.attempts.successor = state.attempts.successor, None
        if successor is not None:
            self.leave(state, successor, abort=True)

    def _shape(
        self, state: RequestState, workers: Sequence[Worker], hits: Hits, now: float, held_s: float = 0.0
    ) -> RequestShape:
        num_remaining = state.request.params.max_tokens - state.attempts.num_base_tokens
        known = {size: held for size, held in hits.items() if held}  # nothing is known of most new prompts
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
            fetches=self._fetches.of(state, workers, known, now) if known else None,
        )

    def _dispatch(self, state: RequestState, choice: Choice, shape: RequestShape, now: float) -> str | None:
        """Send the messages of a choice. Returns the address of a worker that could not take its own, or None."""
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
        """The worker will report these blocks soon: with a window the last of more than it has room for."""
        num_blocks = worker.identity.num_blocks
        kept = hashes[-num_blocks:] if worker.identity.window else hashes
        self._index.expect(worker.address, kept, now, capacity=num_blocks)

    def _assign(self, state: RequestState, worker: Worker, shape: RequestShape, *, local: bool, now: float) -> None:
        """Book the worker; with `local` it computes the prompt itself."""
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
    """The worker's part from the present attempt on."""
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
    )
