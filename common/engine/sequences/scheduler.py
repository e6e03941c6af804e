"""What the schedulers of both workers share: the requests by id, their blocks, and the prefix cache. Pure."""

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

    `unready` holds requests whose grammar is being compiled. They own no blocks, and no other request waits for them.
    `_lingering` holds sequences that have ended while a step in flight still writes to their blocks.
    A step computes at most `step_tokens` tokens of prompts, and `batch_cap` requests run side by side: what flags allow
    (`most_step_tokens`, `max_num_seqs`), or less where a goal wants it (`step_budget.py`).
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_step_tokens: int, max_prompt_logprobs: int, window: int = 0
    ) -> None:
        """`window`: how many tokens every layer looks back to at most, 0: without bound (`common/blocks/window.py`)."""
        self.pool, self.block_size = pool, pool.block_size
        self.window = Window(window, pool.block_size)
        self.max_num_seqs, self.max_prompt_logprobs = max_num_seqs, max_prompt_logprobs
        self.most_step_tokens = max_step_tokens
        self.step_tokens, self.batch_cap = Knob(max_step_tokens, "bound"), Knob(max_num_seqs, "bound")
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
        """Tokens of prompts that a step computes at most, as things are."""
        return self.step_tokens.value

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """What the scheduler has chosen by itself, by name."""
        return {"step_tokens": self.step_tokens, "batch_cap": self.batch_cap}

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether the next step would compute something."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for their grammar."""

    @property
    @abstractmethod
    def num_in_transfer(self) -> int:
        """Requests that wait for a transfer of their KV."""

    @property
    @abstractmethod
    def waiting_shape(self) -> StepShape:
        """Prompts that this worker must still compute, as if they were one step."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that this worker must still compute."""
        return self.waiting_shape.num_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the running sequences that are in the KV cache."""
        return sum(sequence.num_computed for sequence in self.running)

    def find(self, request_id: str) -> S | None:
        return self._by_id.get(request_id)

    def has(self, sequence: S) -> bool:
        """Whether the sequence is still here, and not another one of its id."""
        return self._by_id.get(sequence.request.request_id) is sequence

    def constrain(self, sequence: S, constraint: Constraint) -> None:
        """The grammar of a request is compiled: it may get blocks."""
        sequence.constraint = constraint
        if sequence in self.unready:
            self.unready.remove(sequence)
            self._enqueue(sequence)

    def check_integrity(self) -> BlockCounts:
        """Every owned block belongs to a request that lives or lingers. Raises BlockError otherwise."""
        return self.pool.check_integrity(
            sequence.owned_blocks for sequence in (*self._by_id.values(), *self._lingering)
        )

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def expect_hits(self, sequence: S, num_below: Callable[[Sequence[bytes]], int] = lambda hashes: 0) -> None:
        """Note how much of a new request is cached now, to predict how long it takes.

        `num_below` says how many of a chain's first blocks are in tiers below the prefix cache.
        """
        num_hits = self._cached_prefix(sequence).end
        num_hits += num_below(sequence.hasher.hashes[num_hits : sequence.num_cacheable // self.block_size])
        sequence.num_expected_hits = num_hits * self.block_size

    @abstractmethod
    def _enqueue(self, sequence: S) -> None:
        """Let a sequence wait for blocks, or among `unready` while it awaits its grammar."""

    def _cached_prefix(self, sequence: S) -> CachedPrefix:
        """The cached blocks that the sequence may start from. It does not own them yet."""
        hashes = sequence.hasher.extend(sequence.token_ids)
        return self.pool.match_window(hashes[: sequence.num_cacheable // self.block_size], self.window)

    def _table_end(self, position: int, num_tokens: int) -> int:
        """Entries of the table of a sequence of `num_tokens` tokens, whose next step begins at `position`.

        They have room for the largest step.
        """
        total = self.blocks_for(num_tokens)
        return min(total, self.window.first_block(position) + self._most_owned) if self.window else total

    @property
    def _most_owned(self) -> int:
        """The most blocks that a prompt owns at once while it is computed; without a window it owns all of its own."""
        if not self.window:
            return self.pool.num_blocks
        return min(self.pool.num_blocks, self.window.span_blocks(self.most_step_tokens))

    def _num_available(self, hits: Iterable[int]) -> int:
        """Blocks that are available beside the cached blocks `hits`."""
        return self.pool.num_available - self.pool.num_reclaimed(hits)

    def _give_blocks(self, sequence: S, prefix: CachedPrefix, num_new: int, now: float) -> None:
        """Admit the sequence: from now on it owns the blocks of `prefix` and `num_new` empty ones behind them."""
        self.pool.acquire(prefix.blocks)
        sequence.blocks = [HOLE] * prefix.first + prefix.blocks + self.pool.allocate(num_new)
        sequence.num_gone = prefix.first
        sequence.num_computed = prefix.end * self.block_size
        sequence.num_published = prefix.end
        sequence.admitted_at = sequence.admitted_at or now

    def _chunks(self, order: PromptOrder[S]) -> Iterator[tuple[S, int]]:
        """(sequence, how many of its tokens) to compute in one step, in turn, `max_step_tokens` tokens in all.

        A prompt token whose log-probability is wanted keeps a row of logits: `max_prompt_logprobs` bounds their number.
        """
        budget, logprob_room = self.max_step_tokens, self.max_prompt_logprobs
        for sequence in order.prompts:
            keeps_logits = sequence.wants_prompt_logprobs
            most = min(budget, order.most_tokens(sequence, self.max_step_tokens))
            has_room_for = len(sequence.blocks) * self.block_size - sequence.num_begun
            num_tokens = min(most, sequence.num_remaining, has_room_for, logprob_room if keeps_logits else most)
            if num_tokens:
                yield sequence, num_tokens
                budget -= num_tokens
                logprob_room -= num_tokens if keeps_logits else 0

    def restored(self, sequence: S, num_blocks: int) -> None:
        """Count `num_blocks` blocks behind the computed ones, which were read from tiers or pulled, as computed too.

        Nothing writes to the sequence's blocks now.
        """
        begin, end = sequence.num_computed, sequence.num_computed + num_blocks * self.block_size
        self.pool.wrote(sequence.blocks, begin, end)
        sequence.num_computed = sequence.num_expected_hits = end
        self._publish(sequence, end)

    def _publish(self, sequence: S, num_tokens: int) -> None:
        """Offer the blocks that the sequence's first `num_tokens` tokens fill to later requests."""
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_published:
            hashes = sequence.hasher.extend(sequence.token_ids[: num_full * self.block_size])
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_published = num_full

    def _give_back_before(self, sequence: S, first: int) -> None:
        """Release the blocks of a sequence before `first`, which nothing needs any more. They must not be lent."""
        gone = sequence.blocks[sequence.num_gone : first]
        if gone:
            self.pool.release(gone)
            sequence.blocks[sequence.num_gone : first] = [HOLE] * len(gone)
            sequence.num_gone += len(gone)
            sequence.num_published = max(sequence.num_published, sequence.num_gone)

    def _release(self, sequence: S) -> None:
        """Take all blocks from a sequence."""
        self._check_not_lent(sequence)
        self.pool.release(sequence.owned_blocks)
        sequence.blocks, sequence.num_gone, sequence.num_computed, sequence.num_published = [], 0, 0, 0

    def _check_not_lent(self, sequence: S) -> None:
        if sequence.lent or sequence.read is not None:
            raise BlockError(
                f"request {sequence.request_id} cannot lose blocks that a transfer reads or writes, or a disk"
            )
