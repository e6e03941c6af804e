"""Which prompt tokens a prefill worker computes next. Pure: no clocks, sockets or tensors.

Prompts are admitted in order of arrival as blocks allow, those with a grammar once it is compiled. Each step spends a
token budget over the admitted ones, oldest first, so that short prompts share a step and a long one comes in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import BlockError
from common.grammar.grammar import Constraint
from common.kv.block_pool import BlockCounts, BlockPool
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
    """What to compute in this step, and which prompts were admitted for it."""

    chunks: Sequence[PrefillChunk]
    admitted: Sequence[PrefillSequence]


class PrefillScheduler:
    """Owns the block pool and every prompt of the worker: waiting, computing, or held until its KV is acknowledged.

    `unready` holds prompts whose grammar is being compiled. They own no blocks, and no other prompt waits behind them.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_prompt_logprobs: int = 1024,
    ) -> None:
        self.pool, self.block_size = pool, pool.block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_prompt_logprobs = max_prompt_logprobs
        self.unready: list[PrefillSequence] = []
        self.waiting: deque[PrefillSequence] = deque()
        self.running: list[PrefillSequence] = []
        self.held: dict[str, PrefillSequence] = {}
        self._by_id: dict[str, PrefillSequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PrefillSequence]:
        return iter(list(self._by_id.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.running) or bool(self.waiting and self._plan(self.waiting[0]) is not None)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not computed yet."""
        return sum(s.num_remaining for s in (*self.unready, *self.waiting, *self.running))

    def find(self, request_id: str) -> PrefillSequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: PrefillSequence) -> None:
        """Accept a prompt; it owns no blocks yet."""
        self._by_id[sequence.request_id] = sequence
        (self.unready if sequence.awaits_grammar else self.waiting).append(sequence)

    def constrain(self, sequence: PrefillSequence, constraint: Constraint) -> None:
        """The grammar of an unready prompt is there: it may be admitted."""
        self.unready.remove(sequence)
        sequence.constraint = constraint
        self.waiting.append(sequence)

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. Admitted prompts own their blocks from here on."""
        admitted = self._admit(now)
        budget, logprob_room = self.max_num_batched_tokens, self.max_prompt_logprobs
        chunks: list[PrefillChunk] = []
        for sequence in self.running:
            num_tokens = min(budget, sequence.num_remaining, logprob_room if sequence.wants_prompt_logprobs else budget)
            if num_tokens:
                chunks.append(PrefillChunk(sequence, sequence.num_computed, num_tokens))
                budget -= num_tokens
                logprob_room -= num_tokens if sequence.wants_prompt_logprobs else 0
        return SchedulerOutput(chunks, admitted)

    def advance(self, chunk: PrefillChunk, now: float) -> int:
        """Record a computed chunk and publish its full blocks; how many blocks of the prompt are complete now."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.start + chunk.num_tokens
        self.pool.wrote(sequence.blocks, chunk.start, sequence.num_computed)
        num_full = sequence.num_computed // self.block_size
        for index in range(sequence.num_published, num_full):
            self.pool.publish(sequence.blocks[index], sequence.hasher.hashes[index])
        sequence.num_published = max(sequence.num_published, num_full)
        if not sequence.computed:
            return num_full
        sequence.computed_at = now
        self.running.remove(sequence)
        self.held[sequence.request_id] = sequence
        return len(sequence.blocks)

    def remove(self, sequence: PrefillSequence) -> None:
        """Forget a prompt in whatever state and release its blocks."""
        if self._by_id.get(sequence.request_id) is not sequence:
            return
        if sequence.lent:
            raise BlockError(f"request {sequence.request_id} cannot lose blocks that the KV sender reads")
        del self._by_id[sequence.request_id]
        if self.held.pop(sequence.request_id, None) is None:
            next(state for state in (self.running, self.unready, self.waiting) if sequence in state).remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def check_integrity(self) -> BlockCounts:
        """Every owned block belongs to a live prompt. Raises BlockError otherwise."""
        return self.pool.check_integrity(sequence.blocks for sequence in self._by_id.values())

    def _admit(self, now: float) -> list[PrefillSequence]:
        admitted: list[PrefillSequence] = []
        while self.waiting and (hits := self._plan(self.waiting[0])) is not None:
            sequence = self.waiting.popleft()
            self.pool.acquire(hits)
            sequence.blocks = hits + self.pool.allocate(self._num_blocks(sequence) - len(hits))
            sequence.num_computed = sequence.num_cached = len(hits) * self.block_size
            sequence.num_published = len(hits)
            sequence.admitted_at = now
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _plan(self, sequence: PrefillSequence) -> list[int] | None:
        """The cached blocks that `sequence` starts from, or None if it must wait."""
        if len(self.running) >= self.max_num_seqs:
            return None
        hashes = sequence.hasher.extend(sequence.token_ids)
        hits = self.pool.match(hashes[: sequence.num_cacheable // self.block_size])
        available = self.pool.num_available - self.pool.num_reclaimed(hits)
        return hits if self._num_blocks(sequence) - len(hits) <= available else None

    def _num_blocks(self, sequence: PrefillSequence) -> int:
        return -(-sequence.num_tokens // self.block_size)
