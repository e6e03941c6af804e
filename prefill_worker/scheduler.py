"""Which prompt tokens a prefill worker computes next. Pure: no clocks, sockets or tensors.

One order (`prompt_order`) decides which prompts are admitted and which admitted ones share the token budget of a step:
a long prompt comes in chunks, and others pass it between two of them. While prompts have goals, steps are as small as
they can be without losing tokens a second (`step_budget.py`). An admitted prompt owns all blocks that it needs, so
those that are passed always come to their end. A prompt is admitted only when it is about to be computed: those that
wait own no blocks that a more urgent one could lack.

Where the model looks back through a window, an admitted prompt owns as many blocks as it ever needs at once. After each
chunk it gives those back that are out of the window, and gets as many for the next chunk in the same moment. Blocks
that several prompts share count for each of them there: what one gives back may still be another's.

A prompt that does not fit is passed by others that do. But once the oldest that waits did not fit, others get only as
many blocks as it needs itself. Then nothing else is admitted before it.

A step may be planned while the one before is in flight: a prompt's next chunk follows what is in flight. Three things
wait for the end of that step. Blocks of a prompt that ends meanwhile linger until then. A prompt whose next block the
step computes for another one is admitted afterwards, when it can share it. And in a window a prompt gets its next
chunk afterwards, in the room that the chunk before it gives back.

A computed prompt keeps its blocks until its decode worker has room. So that a flood of batch prompts for full decode
workers does not leave others without blocks, prompts of a lower priority own a share of them at most.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.blocks import HOLE, CachedPrefix
from common.engine.kv import BlockPool
from common.engine.sequences import Knob, PromptOrder, Scheduler, WorkerSequence, prefill_step, prompt_order
from common.latency import StepModel, StepShape
from common.wire.messages import PrefillRequest

if TYPE_CHECKING:
    from torch import Tensor


STEPS_AHEAD = 2
"""A prompt is admitted when its turn comes within so many steps: the decode worker grants blocks during the first."""
MAX_TRIES = 16
"""How many prompts that do not fit a step tries, so that a long queue does not slow it down."""

LOW_SHARE = 0.75
"""The share of all blocks that prompts of a low priority own at most, unless one of them alone needs more. A priority
below 0 is low, and so is one below the highest that came so far."""


@dataclass(slots=True, eq=False)
class PrefillSequence(WorkerSequence):
    """`blocks` covers the whole prompt from admission on. Before, while it was the oldest that waited and did not fit,
    `num_passing_blocks` went to others. A step in flight computes the `num_in_flight` tokens behind those computed.
    `hidden_sum`, float64 [hidden_size], is that of all these tokens, for a mean.

    accepted_at ─ admitted_at ─ computed_at ─ released        (engine clock, seconds)
         queue        prefill        hold
    """

    request: PrefillRequest
    computed_at: float = 0.0
    num_passing_blocks: int = 0
    num_in_flight: int = 0
    hidden_sum: Tensor | None = None

    @property
    def num_begun(self) -> int:
        return self.num_computed + self.num_in_flight

    @property
    def computed(self) -> bool:
        return self.num_computed == self.num_tokens

    @property
    def prefill_s(self) -> float:
        """Seconds from admission to the first token."""
        return self.computed_at - self.admitted_at


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute `num_tokens` tokens of `sequence` from `start` on; the chunk that ends the prompt samples.

    With `all_logits`, what the model makes of every token is kept: logits for log-probabilities of the prompt, hidden
    states for their mean.
    """

    sequence: PrefillSequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def shape(self) -> StepShape:
        return StepShape.of_prompt(self.start, self.end)

    @property
    def sample(self) -> bool:
        return self.end == self.sequence.num_tokens

    @property
    def all_logits(self) -> bool:
        if self.sequence.params.pooling == "mean":
            return True
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
        window: int = 0,
    ) -> None:
        super().__init__(
            pool,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_num_batched_tokens,
            max_prompt_logprobs=max_prompt_logprobs,
            window=window,
        )
        self.waiting: list[PrefillSequence] = []  # the oldest first
        self.held: dict[str, PrefillSequence] = {}
        self._in_flight: dict[PrefillChunk, frozenset[bytes]] = {}  # and the hashes of the blocks that each fills
        self._top_priority = 0
        self._owned: Counter[int] = Counter()  # blocks of prompts, by priority

    @property
    def has_work(self) -> bool:
        if any(self._is_ready(sequence) for sequence in self.running):
            return True
        return any(self._plan(sequence) is not None for sequence in self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.unready) + len(self.waiting)

    @property
    def num_in_transfer(self) -> int:
        return len(self.held)

    @property
    def waiting_shape(self) -> StepShape:
        in_flight = StepShape.sum(chunk.shape for chunk in self._in_flight)
        return in_flight + StepShape.sum(s.remaining_shape for s in (*self.unready, *self.waiting, *self.running))

    def add(self, sequence: PrefillSequence) -> None:
        """Accept a prompt; it owns no blocks yet."""
        self._by_id[sequence.request_id] = sequence
        self._top_priority = max(self._top_priority, sequence.priority)
        self._enqueue(sequence)

    def schedule(
        self, now: float, model: StepModel, restore: Callable[[PrefillSequence], None] = lambda sequence: None
    ) -> SchedulerOutput:
        """The next step. Admitted prompts own their blocks from here on. `model` predicts the times that order them.

        `restore` may begin to read blocks of an admitted prompt; nothing of it is computed while its `read` lasts.
        """
        prompts = [*(sequence for sequence in self.running if sequence.num_remaining), *self.waiting]
        self.step_tokens = self._size_of_step(prompts, model)
        order = prompt_order(prompts, now, model, self.max_step_tokens)
        admitted = self._admit(order, now, restore)
        ready = [sequence for sequence in order.prompts if sequence.blocks and self._is_ready(sequence)]
        running = PromptOrder(ready, order.elder)
        chunks = [
            PrefillChunk(sequence, sequence.num_begun, num_tokens) for sequence, num_tokens in self._chunks(running)
        ]
        return SchedulerOutput(chunks, admitted)

    def launched(self, chunk: PrefillChunk) -> None:
        """Record that a step in flight computes `chunk`: the next step goes on behind it."""
        sequence, size = chunk.sequence, self.block_size
        hashes = sequence.hasher.extend(sequence.token_ids)
        self._in_flight[chunk] = frozenset(hashes[chunk.start // size : chunk.end // size])
        sequence.num_in_flight += chunk.num_tokens

    def ended(self, chunk: PrefillChunk) -> bool:
        """Record that the step in flight of `chunk` has ended, or failed; False when its prompt has ended before.

        `advance` must follow for what it has computed.
        """
        sequence = chunk.sequence
        del self._in_flight[chunk]
        sequence.num_in_flight -= chunk.num_tokens
        if self.has(sequence):
            return True
        if not sequence.num_in_flight:
            self._lingering.remove(sequence)
            self._take_blocks(sequence)
        return False

    def advance(self, chunk: PrefillChunk, now: float) -> int:
        """Record a computed chunk and publish its full blocks; how many blocks of the prompt are complete."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        self.pool.wrote(sequence.blocks, chunk.start, sequence.num_computed)
        self._publish(sequence, sequence.num_computed)
        self._slide(sequence)
        if not sequence.computed:
            return sequence.num_computed // self.block_size
        sequence.computed_at = now
        self.running.remove(sequence)
        self.held[sequence.request_id] = sequence
        return len(sequence.blocks)

    def whole_table(self, sequence: PrefillSequence) -> Sequence[int]:
        """The blocks of an admitted prompt, and holes for those that it gets later."""
        missing = self.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        return [*sequence.blocks, *[HOLE] * missing] if missing else sequence.blocks

    def restored(self, sequence: PrefillSequence, num_blocks: int) -> None:
        super().restored(sequence, num_blocks)
        self._slide(sequence)
        sequence.num_cached = sequence.num_computed
        sequence.num_restored += num_blocks * self.block_size

    def remove(self, sequence: PrefillSequence) -> None:
        """Forget a prompt in any state and release its blocks, once no step in flight writes to them."""
        if not self.has(sequence):
            return
        self._check_not_lent(sequence)
        del self._by_id[sequence.request_id]
        if self.held.pop(sequence.request_id, None) is None:
            next(state for state in (self.running, self.unready, self.waiting) if sequence in state).remove(sequence)
        if sequence.num_in_flight:
            self._lingering.append(sequence)
        else:
            self._take_blocks(sequence)

    def _is_ready(self, sequence: PrefillSequence) -> bool:
        """Whether the next step may compute tokens of an admitted prompt."""
        if sequence.read is not None or not sequence.num_remaining:
            return False
        return not (self.window and sequence.num_in_flight)

    def _take_blocks(self, sequence: PrefillSequence) -> None:
        self._owned[sequence.priority] -= sequence.num_owned
        self._release(sequence)

    def _size_of_step(self, prompts: Sequence[PrefillSequence], model: StepModel) -> Knob:
        start = max((sequence.num_computed for sequence in self.running), default=0)
        has_goals = any(sequence.due_at < math.inf for sequence in prompts)
        return prefill_step(model, start, self.most_step_tokens, has_goals=has_goals)

    def _enqueue(self, sequence: PrefillSequence) -> None:
        if sequence.awaits_grammar:
            self.unready.append(sequence)
        else:
            insort(self.waiting, sequence, key=lambda waiting: waiting.accepted_at)

    def _admit(
        self, order: PromptOrder[PrefillSequence], now: float, restore: Callable[[PrefillSequence], None]
    ) -> list[PrefillSequence]:
        """Admit the prompts whose turn comes in one of the next steps."""
        admitted: list[PrefillSequence] = []
        num_tokens = num_misfits = 0
        for sequence in order.prompts:
            if num_tokens >= STEPS_AHEAD * self.max_step_tokens or (num_misfits >= MAX_TRIES and self.running):
                break
            if not sequence.blocks:
                if (prefix := self._plan(sequence)) is None:
                    num_misfits += 1
                    continue
                self._admit_one(sequence, prefix, now)
                restore(sequence)
                admitted.append(sequence)
            if not self._is_ready(sequence):
                continue  # it fills no step yet
            in_a_step = order.most_tokens(sequence, self.max_step_tokens)
            num_tokens += min(sequence.num_remaining, STEPS_AHEAD * in_a_step)
        return admitted

    def _admit_one(self, sequence: PrefillSequence, prefix: CachedPrefix, now: float) -> None:
        num_new = self._num_new(sequence, prefix)
        oldest = self.waiting[0]
        if sequence is not oldest and self._counts_passing(oldest):
            oldest.num_passing_blocks += num_new
        self.waiting.remove(sequence)
        self._give_blocks(sequence, prefix, num_new, now)
        self._owned[sequence.priority] += sequence.num_owned
        sequence.num_cached = sequence.num_computed
        self.running.append(sequence)

    def _slide(self, sequence: PrefillSequence) -> None:
        """Give back the blocks that left the window, and get those of the next chunk: never more than were given."""
        num_before, position = sequence.num_owned, sequence.num_computed
        self._give_back_before(sequence, self.window.first_block(position))
        wanted = self._table_end(position, sequence.num_tokens) - len(sequence.blocks)
        if wanted > 0:
            sequence.blocks += self.pool.allocate(wanted)
        self._owned[sequence.priority] += sequence.num_owned - num_before

    def _num_new(self, sequence: PrefillSequence, prefix: CachedPrefix) -> int:
        """Blocks that the prompt takes at once beside those of `prefix`."""
        return self._table_end(prefix.end * self.block_size, sequence.num_tokens) - prefix.end

    def _room_beside(self, prefix: CachedPrefix) -> int:
        """Blocks that a prompt may take beside those of `prefix`."""
        if not self.window:
            return self._num_available(prefix.blocks)
        return self.pool.num_blocks - self._owned.total() - len(prefix.blocks)

    def _plan(self, sequence: PrefillSequence) -> CachedPrefix | None:
        """The cached blocks that `sequence` starts from, or None if it must wait, whatever its place in the order."""
        if self._has_no_place or not self.pool.num_available:
            return None
        prefix = self._cached_prefix(sequence)
        if self._is_coming(sequence, prefix.end):
            return None
        num_new = self._num_new(sequence, prefix)
        if num_new > self._room_beside(prefix) or self._exceeds_share(sequence):
            return None
        oldest = self.waiting[0]
        if sequence is oldest or self._exceeds_share(oldest) or not self._counts_passing(oldest):
            return prefix
        return prefix if num_new <= self._most_of(oldest) - oldest.num_passing_blocks else None

    @property
    def _has_no_place(self) -> bool:
        """Whether as many prompts as may run are admitted and not yet computed, or about to be by a step in flight."""
        if len(self.running) < self.max_num_seqs:
            return False
        return sum(sequence.num_remaining > 0 for sequence in self.running) >= self.max_num_seqs

    def _is_coming(self, sequence: PrefillSequence, index: int) -> bool:
        """Whether a step in flight computes block `index` of a waiting prompt, which may then start from it."""
        is_shared = self.pool.enable_prefix_caching and index < sequence.num_cacheable // self.block_size
        if not self._in_flight or not is_shared:
            return False
        block_hash = sequence.hasher.hashes[index]
        return any(block_hash in hashes for hashes in self._in_flight.values())

    def _most_of(self, sequence: PrefillSequence) -> int:
        """The most blocks that a prompt owns at once."""
        return min(self._most_owned, self.blocks_for(sequence.num_tokens))

    def _exceeds_share(self, sequence: PrefillSequence) -> bool:
        """Whether a prompt must wait for others of low priority, whose decode workers may be full."""
        if sequence.priority >= self._top_priority:
            return False
        owned = sum(num_blocks for priority, num_blocks in self._owned.items() if priority < self._top_priority)
        return owned > 0 and owned + self._most_of(sequence) > LOW_SHARE * self.pool.num_blocks

    def _counts_passing(self, oldest: PrefillSequence) -> bool:
        """Whether blocks that others get are counted: the oldest waiting prompt does not fit, or did not before."""
        prefix = self._cached_prefix(oldest)
        return oldest.num_passing_blocks > 0 or self._num_new(oldest, prefix) > self._room_beside(prefix)
