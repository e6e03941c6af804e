"""What a decode worker computes next. Pure: no clocks, sockets or tensors.

Every step holds one token of each decoding sequence (and guesses behind it, see `drafter.py`), plus at most
`local_prefill_chunk` prompt tokens of sequences that are (re)computed here, so that nobody's long prompt stalls
everybody's tokens. Grants for KV from prefill workers and local prefills draw on the same blocks, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diptych.common.block_pool import BlockCounts, BlockPool
from diptych.common.errors import BlockError
from diptych.decode_worker.drafts import NOTHING, Draft
from diptych.decode_worker.sequence import DecodeSequence, RequestStatus


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Compute `num_tokens` tokens of `sequence` from `start` on; sample if that reaches its last token.

    With `score`, tokens of the prompt follow some of them whose log-probabilities are wanted. A single token may have a
    `draft` behind it, whose tokens are run, and sampled behind, as if they were the sequence's.
    """

    sequence: DecodeSequence
    start: int
    num_tokens: int
    draft: Draft = NOTHING

    @property
    def num_rows(self) -> int:
        """Tokens that are run."""
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def num_spans(self) -> int:
        """What the model runs it as: a token of a draft is run by itself."""
        return 1 + len(self.draft.token_ids)

    @property
    def sample(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_planned

    @property
    def score(self) -> bool:
        return self.sequence.scores and self.start + 1 < self.sequence.num_request_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What to compute, what was granted room for its KV to arrive, and what lost its blocks."""

    chunks: Sequence[DecodeChunk]
    granted: Sequence[DecodeSequence]
    preempted: Sequence[DecodeSequence]


class DecodeScheduler:
    """Owns the block pool and every request of the worker. `queue` holds, by age, all that waits for blocks.

    A step may be scheduled while the one before it is in flight: its sequences count one pending token each. One that
    is removed meanwhile lingers: it is known no more, but keeps its blocks until no step in flight writes to them.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        local_prefill_chunk: int,
        watermark: float,
        max_scored_tokens: int = 1024,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_num_seqs, self.local_prefill_chunk = max_num_seqs, local_prefill_chunk
        self.max_scored_tokens = max_scored_tokens
        self.num_watermark_blocks = int(watermark * pool.num_blocks)
        self.running: list[DecodeSequence] = []
        self.queue: list[DecodeSequence] = []
        self._by_id: dict[str, DecodeSequence] = {}
        self._lingering: list[DecodeSequence] = []
        self.num_transferring = 0
        self.num_leaving = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(list(self._by_id.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._next_fits()

    @property
    def lacks_blocks(self) -> bool:
        """Whether the next step would preempt somebody."""
        return sum(self._num_missing(sequence) for sequence in self.running) > self.pool.num_available

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens to be computed here and not computed yet."""
        waiting = sum(s.num_remaining for s in self.queue if s.status is not RequestStatus.OPENED)
        return waiting + sum(s.num_remaining - 1 for s in self.running)

    def find(self, request_id: str) -> DecodeSequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: DecodeSequence) -> None:
        """Accept a request; it owns no blocks yet."""
        self._by_id[sequence.request_id] = sequence
        if sequence.status is RequestStatus.WAITING:
            self._enqueue(sequence)

    def open(self, sequence: DecodeSequence) -> None:
        """Its prefill worker announced the KV: wait for room."""
        sequence.status = RequestStatus.OPENED
        self._enqueue(sequence)

    def land(self, sequence: DecodeSequence) -> None:
        """The KV of all its tokens is in its blocks: join the running batch. Blocks beyond that are given back."""
        self.num_transferring -= 1
        sequence.num_computed = sequence.num_tokens
        num_used = -(-sequence.num_computed // self.block_size)
        self.pool.release(sequence.blocks[num_used:])
        del sequence.blocks[num_used:]
        self._publish(sequence)
        sequence.status = RequestStatus.RUNNING
        self.running.append(sequence)

    def pause(self, sequence: DecodeSequence) -> None:
        """Leave a running sequence out of the batch: its last blocks travel. It keeps all its blocks."""
        if sequence.num_pending:
            raise BlockError(f"request {sequence.request_id} cannot leave: a step in flight writes to its blocks")
        self.running.remove(sequence)
        sequence.status = RequestStatus.LEAVING
        self.num_leaving += 1

    def resume(self, sequence: DecodeSequence) -> None:
        """It stays after all: it is computed on from where it was."""
        self.num_leaving -= 1
        sequence.status = RequestStatus.RUNNING
        self.running.append(sequence)

    def prefill_locally(self, sequence: DecodeSequence, num_landed: int) -> None:
        """Stop expecting KV for `sequence` and compute it here, keeping its first `num_landed` landed blocks."""
        if sequence.status is RequestStatus.TRANSFERRING:
            self.num_transferring -= 1
            self._publish_landed(sequence, num_landed)
            self.pool.release(sequence.blocks)
            sequence.blocks, sequence.num_computed, sequence.num_published = [], 0, 0
        elif sequence.status is RequestStatus.OPENED:
            self.queue.remove(sequence)
        sequence.status = RequestStatus.WAITING
        self._enqueue(sequence)

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. Granted sequences own blocks for their whole prompt from here on."""
        preempted = self._make_room()
        granted = self._admit(now)
        chunks = [DecodeChunk(s, s.num_computed, 1) for s in self.running if s.num_remaining == 1]
        budget, to_score = self.local_prefill_chunk, self.max_scored_tokens
        for sequence in self.running:
            if sequence.num_remaining == 1:
                continue
            num_tokens = min(budget, sequence.num_remaining, to_score if sequence.scores else budget)
            if num_tokens:
                chunks.append(DecodeChunk(sequence, sequence.num_computed, num_tokens))
                budget -= num_tokens
                to_score -= num_tokens if sequence.scores else 0
        return SchedulerOutput(chunks, granted, preempted)

    def advance(self, chunk: DecodeChunk) -> None:
        """Record a computed chunk and publish the blocks it completed."""
        chunk.sequence.num_computed = chunk.start + chunk.num_tokens
        self._publish(chunk.sequence)

    def room_for(self, sequence: DecodeSequence, num_tokens: int) -> int:
        """How many of `num_tokens` guesses behind the next token have blocks, which are allocated unless they lack."""
        wanted = -(-(sequence.num_planned + num_tokens) // self.block_size) - len(sequence.blocks)
        kept = max(self.num_watermark_blocks, len(self.running))  # each may need another one for its next token
        if wanted > 0 and self.pool.num_available - wanted >= kept:
            sequence.blocks += self.pool.allocate(wanted)
        return min(num_tokens, len(sequence.blocks) * self.block_size - sequence.num_planned)

    def accept(self, sequence: DecodeSequence) -> None:
        """The newest token is one that was guessed: its KV is there, and another token was sampled behind it."""
        sequence.num_computed += 1
        self._publish(sequence)

    def launched(self, chunk: DecodeChunk) -> None:
        """A step that samples after `chunk` is in flight."""
        chunk.sequence.num_computed = chunk.start + chunk.num_tokens
        chunk.sequence.num_pending += 1
        chunk.sequence.num_guessed = len(chunk.draft.token_ids)

    def completed(self, sequence: DecodeSequence) -> bool:
        """A step in flight that sampled for `sequence` has ended; False when nobody wants its token any more."""
        sequence.num_pending -= 1
        sequence.num_guessed *= sequence.num_pending > 0  # a step that guesses is the last in flight
        if self.find(sequence.request_id) is sequence:
            self._publish(sequence)
            return True
        if not sequence.num_pending:
            self._lingering.remove(sequence)
            self._release(sequence)
        return False

    def remove(self, sequence: DecodeSequence, num_landed: int = 0) -> None:
        """Forget a request in whatever state and release its blocks, once no step in flight writes to them.

        Of one whose KV was still coming, the first `num_landed` blocks are here: those of known tokens stay cached.
        """
        if self._by_id.get(sequence.request_id) is not sequence:
            return
        del self._by_id[sequence.request_id]
        match sequence.status:
            case RequestStatus.RUNNING:
                self.running.remove(sequence)
            case RequestStatus.TRANSFERRING:
                self.num_transferring -= 1
                self._publish_landed(sequence, num_landed)
            case RequestStatus.LEAVING:
                self.num_leaving -= 1
            case RequestStatus.OPENED | RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self.queue.remove(sequence)
            case RequestStatus.EXPECTING:
                pass
        if sequence.num_pending:
            self._lingering.append(sequence)
        else:
            self._release(sequence)

    def check_integrity(self) -> BlockCounts:
        """Every owned block belongs to a request that lives or lingers. Raises BlockError otherwise."""
        return self.pool.check_integrity(sequence.blocks for sequence in (*self._by_id.values(), *self._lingering))

    def _release(self, sequence: DecodeSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _num_missing(self, sequence: DecodeSequence) -> int:
        """Blocks that its next tokens need and it does not have."""
        return max(0, -(-sequence.num_planned // self.block_size) - len(sequence.blocks))

    def _enqueue(self, sequence: DecodeSequence) -> None:
        index = len(self.queue)
        while index and self.queue[index - 1].accepted_at > sequence.accepted_at:
            index -= 1
        self.queue.insert(index, sequence)

    def _make_room(self) -> list[DecodeSequence]:
        """Give each running sequence the blocks its next tokens need, youngest ones losing theirs if there are none."""
        preempted: list[DecodeSequence] = []
        for sequence in sorted(self.running, key=lambda s: s.accepted_at):
            while sequence.status is RequestStatus.RUNNING:
                missing = self._num_missing(sequence)
                if not missing:
                    break
                if missing <= self.pool.num_available:
                    sequence.blocks += self.pool.allocate(missing)
                    break
                victim = max(self.running, key=lambda s: s.accepted_at)
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _preempt(self, sequence: DecodeSequence) -> None:
        if sequence.num_pending:
            raise BlockError(f"request {sequence.request_id} cannot lose blocks that a step in flight writes to")
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_published = [], 0, 0
        sequence.num_preemptions += 1
        sequence.status = RequestStatus.PREEMPTED
        self._enqueue(sequence)

    def _next_fits(self) -> bool:
        return bool(self.queue) and self._plan(self.queue[0]) is not None

    def _plan(self, sequence: DecodeSequence) -> tuple[list[int], int] | None:
        """(cached blocks, number of blocks to allocate) for the head of the queue, or None if it must wait."""
        num_active = len(self.running) + self.num_transferring + self.num_leaving
        if num_active >= self.max_num_seqs:
            return None
        hashes = sequence.hasher.extend(sequence.token_ids)
        hits = self.pool.match(hashes[: sequence.num_cacheable // self.block_size])
        num_new = -(-sequence.num_room_tokens // self.block_size) - len(hits)
        available = self.pool.num_available - self.pool.num_reclaimed(hits)
        # Headroom for those already here; an idle worker takes whatever fits.
        headroom = self.num_watermark_blocks if num_active else 0
        return (hits, num_new) if num_new + headroom <= available else None

    def _admit(self, now: float) -> list[DecodeSequence]:
        """Admit from the queue's head while there is room, without overtaking: returns those whose KV is to come."""
        granted: list[DecodeSequence] = []
        while self.queue and (plan := self._plan(self.queue[0])) is not None:
            hits, num_new = plan
            sequence = self.queue.pop(0)
            self.pool.acquire(hits)
            sequence.blocks = hits + self.pool.allocate(num_new)
            sequence.num_computed = len(hits) * self.block_size
            sequence.num_published = len(hits)
            sequence.admitted_at = sequence.admitted_at or now
            if not sequence.num_preemptions:
                sequence.num_cached = sequence.num_computed
            if sequence.status is RequestStatus.OPENED:
                sequence.status = RequestStatus.TRANSFERRING
                self.num_transferring += 1
                granted.append(sequence)
            else:
                sequence.status = RequestStatus.RUNNING
                self.running.append(sequence)
        return granted

    def _publish_landed(self, sequence: DecodeSequence, num_landed: int) -> None:
        """Blocks that came are as good as computed ones, where the tokens are known that they hold."""
        sequence.num_computed = min(num_landed, sequence.num_tokens // self.block_size) * self.block_size
        self._publish(sequence)

    def _publish(self, sequence: DecodeSequence) -> None:
        num_full = (sequence.num_computed - sequence.num_pending) // self.block_size
        if num_full > sequence.num_published:
            hashes = sequence.hasher.extend(sequence.token_ids[: num_full * self.block_size])
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_published = num_full
