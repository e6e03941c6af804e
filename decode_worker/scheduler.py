"""Scheduler of a decode worker. Pure: no clocks, sockets or tensors.

Every step has one token of each decoding sequence (and draft tokens after it, see `speculation.py`), plus up to
`local_prefill_chunk` prompt tokens of sequences that are (re)computed here, in the order of `prompt_order`. The limit
prevents long prompts from stalling all streams. With a goal for the time per token, step time predictions limit these
tokens and the batch size (`step_budget.py`); a sequence that has waited for `PATIENCE` times the goal is admitted
nevertheless. `queue.py` selects the waiting requests that get blocks.

If the model has a sliding window, a running sequence releases the blocks that its next token does not see, once neither
a step in flight nor a transfer may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.engine.kv import BlockPool
from common.engine.sequences import TokenGoal, batch_cap, local_chunk, prompt_order
from common.errors import BlockError
from common.latency import StepModel, StepShape
from decode_worker.drafting.draft_tokens import NOTHING, Draft
from decode_worker.queue import PATIENCE, DecodeQueue
from decode_worker.sequence import DecodeSequence, RequestStatus


class DecodeChunk(NamedTuple):
    """Compute `num_tokens` tokens of `sequence` from `start` on, and sample if they include its last token.

    With `all_logits`, logits of all tokens are kept for prompt log probabilities. A single token may have a `draft`:
    the step computes its tokens as if they were the sequence's, and samples after each.
    """

    sequence: DecodeSequence
    start: int
    num_tokens: int
    draft: Draft = NOTHING

    @property
    def num_rows(self) -> int:
        """Number of tokens that the model computes."""
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def num_spans(self) -> int:
        """Number of chunks that the model computes: each draft token is a separate one."""
        return 1 + len(self.draft.token_ids)

    @property
    def sample(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_planned

    @property
    def is_plain(self) -> bool:
        """Whether sampling depends only on parameters and position."""
        return self.start + self.num_tokens >= self.sequence.plain_from

    @property
    def all_logits(self) -> bool:
        return self.sequence.wants_prompt_logprobs and self.start + 1 < self.sequence.num_request_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Chunks to compute, sequences that got blocks for incoming KV, and sequences that lost their blocks."""

    chunks: Sequence[DecodeChunk]
    granted: Sequence[DecodeSequence]
    preempted: Sequence[DecodeSequence]


def shape_of(chunks: Sequence[DecodeChunk]) -> StepShape:
    """Return the shape of a step of these chunks. Draft tokens are separate rows."""
    num_rows = context = 0
    for chunk in chunks:
        if chunk.num_tokens == 1:
            rows = 1 + len(chunk.draft.token_ids)
            num_rows, context = num_rows + rows, context + rows * (chunk.start + 1)
    prompts = (chunk for chunk in chunks if chunk.num_tokens > 1)
    of_prompts = StepShape.sum(StepShape.of_prompt(chunk.start, chunk.start + chunk.num_tokens) for chunk in prompts)
    return StepShape.of_rows(num_rows, context) + of_prompts


class DecodeScheduler(DecodeQueue):
    """Scheduler of all requests of a worker.

    A step may be scheduled while the previous one is in flight: its sequences have one pending token each. A sequence
    that is removed during a step lingers: `find` does not return it, but its blocks are kept until no step in flight
    writes to them.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        local_prefill_chunk: int,
        watermark: float,
        max_prompt_logprobs: int = 1024,
        slo_tpot_s: float = 0.0,
        usual_num_seqs: int | None = None,
        usual_chunk: int | None = None,
        window: int = 0,
    ) -> None:
        """`slo_tpot_s` is the goal for the time per token after the first, in seconds (0: none).

        The usual sizes apply when the goal does not determine them. They default to the limits.
        """
        super().__init__(
            pool,
            max_num_seqs=max_num_seqs,
            max_step_tokens=local_prefill_chunk,
            max_prompt_logprobs=max_prompt_logprobs,
            watermark=watermark,
            goal=TokenGoal(slo_tpot_s),
            usual_num_seqs=max_num_seqs if usual_num_seqs is None else usual_num_seqs,
            window=window,
        )
        self._usual_chunk = usual_chunk

    @property
    def has_work(self) -> bool:
        is_due = any(sequence.read is None and not sequence.awaits_mask for sequence in self.running)
        return is_due or self._next(self._in_turn()) is not None

    @property
    def lacks_blocks(self) -> bool:
        """Whether the next step would preempt a sequence."""
        return sum(self._num_missing(sequence) for sequence in self.running) > self.pool.num_available

    @property
    def waiting_shape(self) -> StepShape:
        waiting = (s for s in (*self.queue, *self.unready) if s.status is not RequestStatus.OPENED)
        prompts = (s for s in self.running if s.num_remaining > 1)
        return StepShape.sum(s.remaining_shape for s in (*waiting, *prompts))

    def add(self, sequence: DecodeSequence) -> None:
        """Add a request without blocks."""
        self._by_id[sequence.request_id] = sequence
        if sequence.status is RequestStatus.WAITING:
            self._enqueue(sequence)

    def open(self, sequence: DecodeSequence, first_block: int = 0) -> None:
        """Queue a sequence whose KV was announced, from `first_block` on, for blocks."""
        sequence.status, sequence.first_block = RequestStatus.OPENED, first_block
        self._enqueue(sequence)

    def start_decoding(self, sequence: DecodeSequence) -> None:
        """Move a sequence whose KV is complete to the running batch. Releases unused blocks."""
        self._check_not_lent(sequence)
        self.num_transferring -= 1
        sequence.num_computed = sequence.num_tokens
        self.pool.wrote(sequence.blocks, sequence.num_gone * self.block_size, sequence.num_computed)
        num_used = self.blocks_for(sequence.num_computed)
        self.pool.release(sequence.blocks[num_used:])
        del sequence.blocks[num_used:]
        self._publish_full(sequence)
        self._slide(sequence)
        sequence.status = RequestStatus.RUNNING
        self.running.append(sequence)

    def skip_to(self, sequence: DecodeSequence, first_block: int) -> None:
        """Release the blocks before `first_block` of a sequence whose KV was announced again, from there on."""
        self._check_not_lent(sequence)
        self._release_before(sequence, first_block)
        sequence.first_block = max(sequence.first_block, first_block)
        sequence.num_received_blocks = max(sequence.num_received_blocks, first_block)

    def pause(self, sequence: DecodeSequence) -> None:
        """Remove a running sequence from the batch while its last blocks are sent. It keeps all blocks."""
        if sequence.num_pending:
            raise BlockError(f"request {sequence.request_id} cannot be paused: a step in flight writes to its blocks")
        self.running.remove(sequence)
        sequence.status = RequestStatus.LEAVING
        self.num_leaving += 1

    def resume(self, sequence: DecodeSequence) -> None:
        """Return a paused sequence to the batch."""
        self.num_leaving -= 1
        sequence.status = RequestStatus.RUNNING
        self.running.append(sequence)

    def prefill_locally(self, sequence: DecodeSequence, num_received: int) -> None:
        """Compute the KV of `sequence` here instead of receiving it. Its first `num_received` blocks are kept."""
        if sequence.status is RequestStatus.TRANSFERRING:
            self.return_blocks(sequence, num_received)
        elif sequence.status is RequestStatus.OPENED:
            self._dequeue(sequence)
        sequence.status = RequestStatus.WAITING
        self._enqueue(sequence)

    def expect_again(self, sequence: DecodeSequence) -> None:
        """Let a sequence wait for the announcement of another prefill worker instead of blocks."""
        if sequence.status is RequestStatus.OPENED:
            self._dequeue(sequence)
            sequence.status = RequestStatus.EXPECTING

    def return_blocks(self, sequence: DecodeSequence, num_received: int) -> None:
        """Let a sequence wait for the announcement without blocks. The first `num_received` of them stay cached."""
        self.num_transferring -= 1
        self._publish_received(sequence, num_received)
        self._release(sequence)
        sequence.status = RequestStatus.EXPECTING

    def schedule(
        self,
        now: float,
        model: StepModel,
        withdraw: Callable[[DecodeSequence], None] = lambda sequence: None,
        restore: Callable[[DecodeSequence], None] = lambda sequence: None,
    ) -> SchedulerOutput:
        """Return the next step. Granted sequences own blocks for their whole prompt from now on.

        `model` predicts step times for the order of prompts (`prompt_order`). `withdraw` revokes the blocks of a
        sequence from any transfer or read before it is preempted. `restore` may start to read blocks of a prompt that
        is computed here; none of it is computed while its `read` is in progress.
        """
        self._now, self._model_error = now, model.error
        step_s = model.seconds(StepShape.of_rows(len(self.running), self.num_context_tokens))
        self._patience_s = max(PATIENCE * self.goal.goal_s, self.goal.spare_s(step_s))
        self.batch_cap = batch_cap(model, self._mean_context, self.goal, self.max_num_seqs, self._usual_num_seqs)
        preempted = self._make_room(withdraw)
        granted = self._admit(now, restore)
        remaining = [sequence.num_remaining for sequence in self.running]
        chunks = [
            DecodeChunk(s, s.num_computed, 1)
            for s, left in zip(self.running, remaining, strict=True)
            if left == 1 and not s.skips_step
        ]
        prompts = [s for s, left in zip(self.running, remaining, strict=True) if left > 1 and s.read is None]
        rows = StepShape.of_rows(len(chunks), sum(chunk.start + 1 for chunk in chunks))
        start = max((sequence.num_computed for sequence in prompts), default=0)
        self.step_tokens = local_chunk(model, rows, start, self.goal, self.most_step_tokens, self._usual_chunk)
        order = prompt_order(prompts, now, model, self.max_step_tokens, rows)
        chunks += [
            DecodeChunk(sequence, sequence.num_computed, num_tokens) for sequence, num_tokens in self._chunks(order)
        ]
        return SchedulerOutput(chunks, granted, preempted)

    def advance(self, chunk: DecodeChunk) -> bool:
        """Record a computed chunk and publish the blocks it completed.

        Returns False if its tokens must be dropped: the sequence was deferred, and its last token is computed again.
        """
        sequence, is_wanted = chunk.sequence, not chunk.sequence.deferred
        sequence.deferred = False
        sequence.num_computed = chunk.start + chunk.num_tokens - (not is_wanted)
        self.pool.wrote(sequence.blocks, chunk.start, sequence.num_computed)
        self._publish_full(sequence)
        self._slide(sequence)
        return is_wanted

    def restored(self, sequence: DecodeSequence, num_blocks: int) -> None:
        super().restored(sequence, num_blocks)
        self._slide(sequence)
        if self.window:
            sequence.blocks += self.pool.allocate(min(self._num_missing(sequence), self.pool.num_available))
        if not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
            sequence.num_restored += num_blocks * self.block_size

    def room_for(self, sequence: DecodeSequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` draft tokens after the next one fit. Allocates blocks if enough are free."""
        wanted = self.blocks_for(sequence.num_planned + num_tokens) - len(sequence.blocks)
        # Each sequence may need another block for its next token.
        kept = max(self.num_watermark_blocks, len(self.running))
        if wanted > 0 and self.pool.num_available - wanted >= kept:
            sequence.blocks += self.pool.allocate(wanted)
        return min(num_tokens, len(sequence.blocks) * self.block_size - sequence.num_planned)

    def accept(self, sequence: DecodeSequence) -> None:
        """Accept the newest token, which was drafted: the step has written its KV and sampled after it."""
        self.pool.wrote(sequence.blocks, sequence.num_computed, sequence.num_computed + 1)
        sequence.num_computed += 1
        self._publish_full(sequence)
        self._slide(sequence)

    def launched(self, chunk: DecodeChunk) -> None:
        """Record that a step that samples after `chunk` is in flight."""
        chunk.sequence.num_computed = chunk.start + chunk.num_tokens
        chunk.sequence.num_pending += 1
        chunk.sequence.num_drafted = len(chunk.draft.token_ids)

    def completed(self, chunk: DecodeChunk) -> bool:
        """Record that a step in flight has computed `chunk`.

        Returns False if its tokens must be dropped: the sequence has ended or was deferred.
        """
        if not self._end_step_of(chunk.sequence):
            return False
        if chunk.sequence.deferred:
            chunk.sequence.deferred, chunk.sequence.num_computed = False, chunk.start
            return False
        self.pool.wrote(chunk.sequence.blocks, chunk.start, chunk.start + chunk.num_tokens)
        self._publish_full(chunk.sequence)
        self._slide(chunk.sequence)
        return True

    def failed(self, chunk: DecodeChunk) -> None:
        """Record that a step in flight failed. Its slots are undefined, so `chunk` is never published."""
        self._end_step_of(chunk.sequence)
        chunk.sequence.deferred = False

    def remove(self, sequence: DecodeSequence, num_received: int = 0) -> None:
        """Forget a request in any state and release its blocks once no step in flight writes to them.

        If its KV was in transfer, the first `num_received` blocks have arrived: those of known tokens stay cached.
        """
        if not self.has(sequence):
            return
        del self._by_id[sequence.request_id]
        match sequence.status:
            case RequestStatus.RUNNING:
                self.running.remove(sequence)
                self.goal.answered(sequence.num_tokens - sequence.num_request_tokens)
            case RequestStatus.TRANSFERRING:
                self.num_transferring -= 1
                self._publish_received(sequence, num_received)
            case RequestStatus.LEAVING:
                self.num_leaving -= 1
            case RequestStatus.OPENED | RequestStatus.WAITING | RequestStatus.PREEMPTED:
                self._dequeue(sequence)
            case RequestStatus.EXPECTING:
                pass
        if sequence.num_pending:
            self._lingering.append(sequence)
        else:
            self._release(sequence)

    def _end_step_of(self, sequence: DecodeSequence) -> bool:
        """Record that a step in flight has ended for the sequence. Return whether it is still scheduled."""
        sequence.num_pending -= 1
        sequence.num_drafted *= sequence.num_pending > 0  # no step follows one with draft tokens
        if self.has(sequence):
            return True
        if not sequence.num_pending:
            self._lingering.remove(sequence)
            self._release(sequence)
        return False

    def _num_missing(self, sequence: DecodeSequence) -> int:
        """Return the number of blocks that the sequence needs for its next tokens."""
        if sequence.num_planned <= len(sequence.blocks) * self.block_size:
            return 0  # most sequences in most steps
        return max(0, self._table_end(_position(sequence), sequence.num_planned) - len(sequence.blocks))

    def _slide(self, sequence: DecodeSequence) -> None:
        """Release the blocks that no uncomputed token sees, unless they are lent."""
        if self.window and not sequence.lent:
            self._release_before(sequence, self.window.first_block(_position(sequence)))

    def _make_room(self, withdraw: Callable[[DecodeSequence], None]) -> list[DecodeSequence]:
        """Allocate the blocks for the next tokens of each running sequence, preempting others if necessary.

        Preempts the lowest priority first, and the youngest among equals.
        """
        preempted: list[DecodeSequence] = []
        for sequence in sorted(filter(self._num_missing, self.running), key=_preemption_key):
            while sequence.status is RequestStatus.RUNNING:
                missing = self._num_missing(sequence)
                if not missing:
                    break
                if missing <= self.pool.num_available:
                    sequence.blocks += self.pool.allocate(missing)
                    break
                victim = max(self.running, key=_preemption_key)
                withdraw(victim)
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _preempt(self, sequence: DecodeSequence) -> None:
        if sequence.num_pending:
            raise BlockError(f"request {sequence.request_id} cannot lose blocks that a step in flight writes to")
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_preemptions += 1
        sequence.status = RequestStatus.PREEMPTED
        self._enqueue(sequence)

    def _admit(self, now: float, restore: Callable[[DecodeSequence], None]) -> list[DecodeSequence]:
        """Admit waiting requests, oldest first, while they fit. Return those whose KV another worker sends."""
        granted: list[DecodeSequence] = []
        in_turn = self._in_turn()
        while (admission := self._next(in_turn)) is not None:
            sequence, prefix, num_new = admission.sequence, admission.prefix, admission.num_new
            in_turn.remove(sequence)
            place = self.queue.index(sequence)
            del self.queue[place]
            self._num_since_oldest = self._num_since_oldest + 1 if place else 0
            sequence.num_passing_blocks = 0  # starts again after a preemption
            for passed in self.queue[:place]:
                passed.num_passing_blocks += num_new
            self._give_blocks(sequence, prefix, num_new, now)
            if not sequence.num_preemptions:
                sequence.num_cached = sequence.num_computed
            if sequence.status is RequestStatus.OPENED:
                sequence.status = RequestStatus.TRANSFERRING
                self.num_transferring += 1
                granted.append(sequence)
            else:
                sequence.status = RequestStatus.RUNNING
                self.running.append(sequence)
                restore(sequence)
        return granted

    def _publish_received(self, sequence: DecodeSequence, num_received: int) -> None:
        """Publish the received blocks whose tokens are known, as if they were computed here."""
        num_known, first = min(num_received, sequence.num_tokens // self.block_size), sequence.num_gone
        if num_known > first:
            sequence.num_computed = num_known * self.block_size
            self.pool.wrote(sequence.blocks, first * self.block_size, sequence.num_computed)
            self._publish_full(sequence)

    def _publish_full(self, sequence: DecodeSequence) -> None:
        """Publish the blocks that no step in flight still writes."""
        self._publish(sequence, sequence.num_computed - sequence.num_pending)


def _position(sequence: DecodeSequence) -> int:
    """Return the first position that no completed step has computed. A step in flight may still read its window."""
    return sequence.num_computed - sequence.num_pending


def _preemption_key(sequence: DecodeSequence) -> tuple[int, float]:
    """Sort key of preemption: highest priority first, and oldest first among equals. The last is preempted."""
    return (-sequence.priority, sequence.accepted_at)
