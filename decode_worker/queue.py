"""Queue of requests that wait for blocks. Pure: no clocks, sockets or tensors.

Grants for KV from prefill workers and local prefills compete for the same blocks, oldest first, where a level of
priority counts as some seconds of age. Younger requests may overtake one that does not fit, until they have taken as
many blocks as it needs.

With a goal for the time per token, a request whose KV another worker sends must join the batch soon, because its client
has the first token. One that has waited for longer than its answer can spare will miss the goal, as will one whose
first token was late. These yield to those of their priority that can still meet their goals: otherwise all answers
would wait equally long in an overload, and all would miss the goal. Among the others the smallest comes first, which
maximises the number in time. Some admissions go to the oldest request once it has waited for long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.blocks import CachedPrefix
from common.engine.kv import BlockPool
from common.engine.sequences import Scheduler, TokenGoal
from decode_worker.sequence import DecodeSequence, RequestStatus

PATIENCE = 8
"""Wait for the batch that each request can spare, in multiples of the goal for the time per token. Its client usually
reads already, so the wait counts for its tokens: an answer of 180 tokens, at 0.95 of the goal each, can spare 9 times
the goal. Where steps take less of the goal, answers can spare more."""
YIELD_S = 10.0
"""Wait of the oldest request, in seconds, from which it gets some of the admissions out of turn."""
ADMISSIONS_PER_OLDEST = 8
"""One of this many admissions goes to such a request, so that none starves."""
MUCH_ERROR = 0.25
"""Error of the step model above which the predicted batch size does not keep requests out for longer than `PATIENCE`.
A larger batch than the goal allows makes all answers late."""
MAX_TRIED = 16
"""Maximum number of waiting requests tried per step, so that a long queue does not slow it down."""


@dataclass(frozen=True, slots=True)
class _Admission:
    """A waiting request gets these cached blocks and `num_new` more."""

    sequence: DecodeSequence
    prefix: CachedPrefix
    num_new: int


class DecodeQueue(Scheduler[DecodeSequence]):
    """Scheduler base class. `queue` has the requests that wait for blocks, by age and priority."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_prompt_logprobs: int,
        watermark: float,
        goal: TokenGoal,
        usual_num_seqs: int,
        window: int,
    ) -> None:
        super().__init__(
            pool,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            max_prompt_logprobs=max_prompt_logprobs,
            window=window,
        )
        self.goal, self._usual_num_seqs = goal, usual_num_seqs
        self.num_watermark_blocks = int(watermark * pool.num_blocks)
        self.queue: list[DecodeSequence] = []
        self.num_transferring = self.num_leaving = 0
        self._now = 0.0
        self._patience_s = PATIENCE * goal.goal_s
        self._model_error = 0.0
        self._num_since_oldest = 0  # admissions since the oldest request was admitted

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.unready)

    @property
    def num_in_transfer(self) -> int:
        return self.num_transferring + self.num_leaving

    def _dequeue(self, sequence: DecodeSequence) -> None:
        (self.unready if sequence in self.unready else self.queue).remove(sequence)

    def _enqueue(self, sequence: DecodeSequence) -> None:
        if sequence.awaits_grammar:
            self.unready.append(sequence)
            return
        index = len(self.queue)
        while index and self.queue[index - 1].rank > sequence.rank:
            index -= 1
        self.queue.insert(index, sequence)

    @property
    def _num_active(self) -> int:
        return len(self.running) + self.num_transferring + self.num_leaving

    @property
    def _mean_context(self) -> float:
        """Mean number of tokens of the sequences in the batch, or in the queue if the batch is empty."""
        if self.running:
            return self.num_context_tokens / len(self.running)
        waiting = self.queue[:MAX_TRIED]
        return sum(sequence.num_tokens for sequence in waiting) / max(1, len(waiting))

    @property
    def _num_places(self) -> int:
        """Current maximum batch size. Larger if a request has waited for too long and the step model is unreliable."""
        patience_s = PATIENCE * self.goal.goal_s if self._model_error > MUCH_ERROR else math.inf
        if self.queue and self._now - self._waits_since(self.queue[0]) > patience_s:
            return max(self.batch_cap.value, self._usual_num_seqs)
        return min(self.batch_cap.value, self.max_num_seqs)

    @property
    def _is_full(self) -> bool:
        return self._num_active >= self._num_places

    def _next(self, in_turn: Sequence[DecodeSequence]) -> _Admission | None:
        """Return the first request that fits and may overtake those before it. `in_turn` is from `_in_turn`."""
        if self._is_full:
            return None
        limit = self.pool.num_blocks  # blocks that younger requests may take
        for sequence in (self.queue if self._is_oldest_due else in_turn)[:MAX_TRIED]:
            prefix = self._cached_prefix(sequence)
            num_new = self._num_new(sequence, prefix)
            if num_new <= limit and num_new + self._headroom <= self._num_available(prefix.blocks):
                return _Admission(sequence, prefix, num_new)
            # Nothing may overtake a preempted sequence, whose client is already reading.
            left = num_new - sequence.num_passing_blocks if sequence.status is not RequestStatus.PREEMPTED else 0
            limit = min(limit, left)
            if limit <= 0:
                break
        return None

    def _in_turn(self) -> list[DecodeSequence]:
        """Return the waiting requests in the order in which they are tried: those that will miss a goal last.

        Determined once per step, because the queue may be long. Empty if no request can be admitted.
        """
        if self._is_full or self._num_available(()) < self._headroom:
            return []
        return sorted(self.queue, key=self._turn) if self.goal.is_set else list(self.queue)

    def _turn(self, sequence: DecodeSequence) -> tuple[bool, int, bool, int]:
        """Sort key of a waiting request with a goal. Equal requests keep their order in the queue."""
        is_preempted = sequence.status is RequestStatus.PREEMPTED
        is_late = not is_preempted and self._is_late(sequence)
        return not is_preempted, -sequence.priority, is_late, sequence.num_room_tokens

    @property
    def _is_oldest_due(self) -> bool:
        """Whether the oldest request gets the next admission, although others come before it."""
        if self._num_since_oldest < ADMISSIONS_PER_OLDEST - 1 or not self.queue:
            return False
        return self._now - self._waits_since(self.queue[0]) > YIELD_S

    def _is_late(self, sequence: DecodeSequence) -> bool:
        """Return whether a request will miss a goal.

        Its first token is late, or it waits for the batch for longer than its answer can spare.
        """
        is_opened = sequence.status is RequestStatus.OPENED
        if not sequence.has_output and sequence.due_at < (sequence.opened_at if is_opened else self._now):
            return True
        return is_opened and self._now - self._waits_since(sequence) > self._patience_s

    @staticmethod
    def _waits_since(sequence: DecodeSequence) -> float:
        return max(sequence.accepted_at, sequence.opened_at)

    def _cached_prefix(self, sequence: DecodeSequence) -> CachedPrefix:
        """Return the cached blocks. If another worker sends KV, those before `first_block` are not needed."""
        if not sequence.first_block or sequence.status is not RequestStatus.OPENED:
            return super()._cached_prefix(sequence)
        hashes = sequence.hasher.extend(sequence.token_ids)
        first, num_cacheable = sequence.first_block, sequence.num_cacheable // self.block_size
        return CachedPrefix(first, self.pool.match(hashes[first:num_cacheable]))

    def _num_new(self, sequence: DecodeSequence, prefix: CachedPrefix) -> int:
        """Return the number of blocks to allocate at admission in addition to `prefix`."""
        if sequence.status is RequestStatus.OPENED:
            return self.blocks_for(sequence.num_room_tokens) - prefix.end
        return self._table_end(prefix.end * self.block_size, sequence.num_room_tokens) - prefix.end

    @property
    def _headroom(self) -> int:
        """Blocks to keep free for running sequences: 0 on an idle worker."""
        return self.num_watermark_blocks if self._num_active else 0
