"""Base class of both workers' schedulers: requests by ID, their blocks, and the prefix cache. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from common.blocks import HOLE, CachedPrefix, Window
from common.engine.kv import BlockCounts, BlockPool
from common.engine.sequences.prompt_ordering import PromptOrder
from common.engine.sequences.sequence import WorkerSequence
from common.engine.sequences.step_budget import Knob
from common.errors import BlockError
from common.latency import StepShape

if TYPE_CHECKING:  # torch: schedulers also run without it, in virtual time
    from common.grammar import Constraint

S = TypeVar("S", bound=WorkerSequence)


class Scheduler(ABC, Generic[S]):
    """Owns the block pool and every request of the worker.

    `unready` requests wait for their grammar. They own no blocks and do not delay other requests. `_lingering`
    sequences have ended, but a step in flight still writes to their blocks. A step computes at most `step_tokens`
    prompt tokens, up to `late_tokens` if it contains prompts that miss their goals, and at most `batch_cap` requests
    run concurrently. All are limited by flags (`most_step_tokens`, `max_num_seqs`) and may be reduced to meet latency
    goals (`step_budget.py`).
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_step_tokens: int, max_prompt_logprobs: int, window: int = 0
    ) -> None:
        """`window`: maximum attention window of all layers, in tokens; 0 if unlimited (`common/blocks/window.py`)."""
        self.pool, self.block_size = pool, pool.block_size
        self.window = Window(window, pool.block_size)
        self.max_num_seqs, self.max_prompt_logprobs = max_num_seqs, max_prompt_logprobs
        self.most_step_tokens = max_step_tokens
        self.step_tokens, self.batch_cap = Knob(max_step_tokens, "bound"), Knob(max_num_seqs, "bound")
        self.late_tokens = max_step_tokens
        self.running: list[S] = []
        self.unready: list[S] = []
        self._by_id: dict[str, S] = {}
        self._lingering: list[S] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._by_id.values()))

    @property
    def max_step_tokens(self) -> int:
        """Current maximum of prompt tokens per step."""
        return self.step_tokens.value

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """Self-tuned parameters, by name."""
        return {"step_tokens": self.step_tokens, "batch_cap": self.batch_cap}

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether the next step would compute something."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks or for their grammar."""

    @property
    @abstractmethod
    def num_in_transfer(self) -> int:
        """Number of requests that wait for a transfer of their KV."""

    @property
    @abstractmethod
    def waiting_shape(self) -> StepShape:
        """Shape of all prompts that this worker must still compute, as if in one step."""

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens that this worker must still compute."""
        return self.waiting_shape.num_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens of running sequences in the KV cache."""
        return sum(sequence.num_computed for sequence in self.running)

    def find(self, request_id: str) -> S | None:
        return self._by_id.get(request_id)

    def has(self, sequence: S) -> bool:
        """Return whether this sequence is still present, rather than a newer one with the same ID."""
        return self._by_id.get(sequence.request.request_id) is sequence

    def constrain(self, sequence: S, constraint: Constraint) -> None:
        """Set a request's compiled grammar. The request may then get blocks."""
        sequence.constraint = constraint
        if sequence in self.unready:
            self.unready.remove(sequence)
            self._enqueue(sequence)

    def check_integrity(self) -> BlockCounts:
        """Check that every owned block belongs to a live or lingering request. Raises BlockError."""
        return self.pool.check_integrity(
            sequence.owned_blocks for sequence in (*self._by_id.values(), *self._lingering)
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def expect_hits(self, sequence: S, num_below: Callable[[Sequence[bytes]], int] = lambda hashes: 0) -> None:
        """Record how much of a new request is cached, for the prediction of its duration.

        `num_below` returns how many of a chain's leading blocks are in tiers below the prefix cache.
        """
        num_hits = self._cached_prefix(sequence).end
        num_hits += num_below(sequence.hasher.hashes[num_hits : sequence.num_cacheable // self.block_size])
        sequence.num_expected_hits = num_hits * self.block_size

    @abstractmethod
    def _enqueue(self, sequence: S) -> None:
        """Queue a sequence for blocks, or in `unready` while it waits for its grammar."""

    def _cached_prefix(self, sequence: S) -> CachedPrefix:
        """Return the cached blocks that the sequence may start from, without acquiring them."""
        hashes = sequence.hasher.extend(sequence.token_ids)
        return self.pool.match_window(hashes[: sequence.num_cacheable // self.block_size], self.window)

    def _table_end(self, position: int, num_tokens: int) -> int:
        """Return the table size of a sequence of `num_tokens` tokens whose next step begins at `position`.

        It provides space for the largest step.
        """
        total = self.blocks_for(num_tokens)
        return min(total, self.window.first_block(position) + self._most_owned) if self.window else total

    @property
    def _most_owned(self) -> int:
        """Maximum number of blocks that a prompt owns while it is computed. Unlimited without a window."""
        if not self.window:
            return self.pool.num_blocks
        return min(self.pool.num_blocks, self.window.span_blocks(self.most_step_tokens))

    def _num_available(self, hits: Iterable[int]) -> int:
        """Return the number of available blocks other than the cached blocks `hits`."""
        return self.pool.num_available - self.pool.num_reclaimed(hits)

    def _give_blocks(self, sequence: S, prefix: CachedPrefix, num_new: int, now: float) -> None:
        """Admit the sequence with the blocks of `prefix`, followed by `num_new` empty blocks."""
        self.pool.acquire(prefix.blocks)
        sequence.blocks = [HOLE] * prefix.first + prefix.blocks + self.pool.allocate(num_new)
        sequence.num_gone = prefix.first
        sequence.num_computed = prefix.end * self.block_size
        sequence.num_published = prefix.end
        sequence.admitted_at = sequence.admitted_at or now

    def _chunks(self, order: PromptOrder[S]) -> Iterator[tuple[S, int]]:
        """Yield (sequence, number of tokens) for one step, in order, up to `max_step_tokens` tokens in total.

        Prompt tokens with logprobs each require a row of logits; `max_prompt_logprobs` limits their number.
        """
        budget, logprob_room = self.max_step_tokens, self.max_prompt_logprobs
        for sequence in order.prompts:
            keeps_logits = sequence.wants_prompt_logprobs
            most = min(budget, order.most_tokens(sequence, self.max_step_tokens))
            if order.is_late(sequence):
                most = max(0, min(most, self.late_tokens - (self.max_step_tokens - budget)))
            has_room_for = len(sequence.blocks) * self.block_size - sequence.num_begun
            num_tokens = min(most, sequence.num_remaining, has_room_for, logprob_room if keeps_logits else most)
            if num_tokens:
                yield sequence, num_tokens
                budget -= num_tokens
                logprob_room -= num_tokens if keeps_logits else 0

    def restored(self, sequence: S, num_blocks: int) -> None:
        """Count `num_blocks` blocks after the computed ones, which were read or pulled, as computed.

        Nothing may write to the sequence's blocks at this time.
        """
        begin, end = sequence.num_computed, sequence.num_computed + num_blocks * self.block_size
        self.pool.wrote(sequence.blocks, begin, end)
        sequence.num_computed = sequence.num_expected_hits = end
        self._publish(sequence, end)

    def _publish(self, sequence: S, num_tokens: int) -> None:
        """Publish the blocks filled by the sequence's first `num_tokens` tokens to later requests."""
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_published:
            hashes = sequence.hasher.extend(sequence.token_ids[: num_full * self.block_size])
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_published = num_full

    def _release_before(self, sequence: S, first: int) -> None:
        """Release the blocks of a sequence before `first`, which are no longer needed. They must not be lent."""
        gone = sequence.blocks[sequence.num_gone : first]
        if gone:
            self.pool.release(gone)
            sequence.blocks[sequence.num_gone : first] = [HOLE] * len(gone)
            sequence.num_gone += len(gone)
            sequence.num_published = max(sequence.num_published, sequence.num_gone)

    def _release(self, sequence: S) -> None:
        """Release all blocks of a sequence."""
        self._check_not_lent(sequence)
        self.pool.release(sequence.owned_blocks)
        sequence.blocks, sequence.num_gone, sequence.num_computed, sequence.num_published = [], 0, 0, 0

    def _check_not_lent(self, sequence: S) -> None:
        if sequence.lent or sequence.read is not None:
            raise BlockError(
                f"cannot release blocks of request {sequence.request_id}: a transfer or disk read uses them"
            )
