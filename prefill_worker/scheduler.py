"""Which prompt tokens a prefill worker computes next. Pure: no clocks, sockets or tensors.

Prompts are admitted in order of arrival as blocks allow, those with a grammar once it is compiled. Each step spends a
token budget on the admitted ones, oldest first, so that short prompts share a step and a long one comes in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.block_pool import BlockCounts, BlockPool
from common.latency.step_model import StepShape
from common.requests.scheduler import Scheduler
from prefill_worker.sequence import PrefillSequence


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute `num_tokens` tokens of `sequence` from `start` on; the chunk that ends the prompt samples.

    With `all_logits`, the logits of every token are kept: the request wants log-probabilities of its prompt.
    """

    sequence: PrefillSequence
    start: int
    num_tokens: int

    @property
    def sample(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_tokens

    @property
    def all_logits(self) -> bool:
        return self.sequence.wants_prompt_logprobs and self.start + 1 < self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Chunks to compute, and prompts that were admitted for them."""

    chunks: Sequence[PrefillChunk]
    admitted: Sequence[PrefillSequence]


class PrefillScheduler(Scheduler[PrefillSequence]):
    """Keeps each prompt of the worker: `unready`, `waiting`, `running`, or `held` until its KV is acknowledged."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_prompt_logprobs: int = 1024,
    ) -> None:
        super().__init__(pool, max_num_seqs=max_num_seqs, max_prompt_logprobs=max_prompt_logprobs)
        self.max_step_tokens = max_num_batched_tokens
        self.waiting: deque[PrefillSequence] = deque()
        self.held: dict[str, PrefillSequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running) or bool(self.waiting and self._plan(self.waiting[0]) is not None)

    @property
    def num_waiting(self) -> int:
        return len(self.unready) + len(self.waiting)

    @property
    def num_in_transfer(self) -> int:
        return len(self.held)

    @property
    def waiting_shape(self) -> StepShape:
        return StepShape.sum(s.remaining_shape for s in (*self.unready, *self.waiting, *self.running))

    def add(self, sequence: PrefillSequence) -> None:
        """Accept a prompt; it owns no blocks yet."""
        self._by_id[sequence.request_id] = sequence
        self._enqueue(sequence)

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. Admitted prompts own their blocks from here on."""
        admitted = self._admit(now)
        chunks = [
            PrefillChunk(sequence, sequence.num_computed, num_tokens)
            for sequence, num_tokens in self._chunks(self.running, self.max_step_tokens)
        ]
        return SchedulerOutput(chunks, admitted)

    def advance(self, chunk: PrefillChunk, now: float) -> int:
        """Record a computed chunk and publish its full blocks; how many blocks of the prompt are complete."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.start + chunk.num_tokens
        self.pool.wrote(sequence.blocks, chunk.start, sequence.num_computed)
        self._publish(sequence, sequence.num_computed)
        if not sequence.computed:
            return sequence.num_computed // self.block_size
        sequence.computed_at = now
        self.running.remove(sequence)
        self.held[sequence.request_id] = sequence
        return len(sequence.blocks)

    def remove(self, sequence: PrefillSequence) -> None:
        """Forget a prompt in any state and release its blocks."""
        if not self.has(sequence):
            return
        self._check_not_lent(sequence)
        del self._by_id[sequence.request_id]
        if self.held.pop(sequence.request_id, None) is None:
            next(state for state in (self.running, self.unready, self.waiting) if sequence in state).remove(sequence)
        self._release(sequence)

    def check_integrity(self) -> BlockCounts:
        """Every owned block belongs to a live prompt. Raises BlockError otherwise."""
        return self.pool.check_integrity(sequence.blocks for sequence in self._by_id.values())

    def _enqueue(self, sequence: PrefillSequence) -> None:
        (self.unready if sequence.awaits_grammar else self.waiting).append(sequence)

    def _admit(self, now: float) -> list[PrefillSequence]:
        admitted: list[PrefillSequence] = []
        while self.waiting and (hits := self._plan(self.waiting[0])) is not None:
            sequence = self.waiting.popleft()
            self._give_blocks(sequence, hits, self.blocks_for(sequence.num_tokens) - len(hits), now)
            sequence.num_cached = sequence.num_computed
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _plan(self, sequence: PrefillSequence) -> list[int] | None:
        """The cached blocks that `sequence` starts from, or None if it must wait."""
        if len(self.running) >= self.max_num_seqs:
            return None
        hits = self._cached_prefix(sequence)
        num_new = self.blocks_for(sequence.num_tokens) - len(hits)
        return hits if num_new <= self._num_available(hits) else None
