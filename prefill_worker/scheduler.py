"""Scheduler of a prefill worker. Pure: no clocks, sockets or tensors.

One order (`prompt_order`) determines which prompts are admitted, and which admitted ones share the token budget of a
step: a long prompt is computed in chunks, and other prompts may overtake it between them. While prompts have goals,
steps are as small as possible without losing throughput (`step_budget.py`), and prompts that will miss their goal are
computed in still smaller ones, so that new arrivals may meet theirs. An admitted prompt owns all blocks
that it needs, so overtaken prompts can always finish. Prompts are admitted only when they are about to be computed, so
that waiting ones own no blocks that a more urgent one might need.

If the model has a sliding window, an admitted prompt owns the maximum number of blocks that it needs at once. After
each chunk it releases those that are out of the window, and immediately allocates up to that number for the next one.
Blocks that several prompts share are counted for each of them, because a released block may still belong to another
prompt.

Prompts that fit may overtake one that does not. Once the oldest waiting prompt did not fit, others get at most the
number of blocks that it needs. Then nothing else is admitted before it.

A step may be planned while the previous one is in flight, and continues after its chunks. Three things wait for the end
of that step. Blocks of a prompt that ends during the step linger. A prompt whose next block the step computes for
another prompt is admitted afterwards, to share the block. With a window, a prompt gets its next chunk afterwards, in
the blocks that the previous chunk releases.

A computed prompt keeps its blocks until its decode worker has free blocks. Prompts of lower priority may own only a
share of all blocks, so that many batch prompts for busy decode workers do not exhaust them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from common.blocks import HOLE, CachedPrefix
from common.engine.kv import BlockPool
from common.engine.sequences import Knob, PromptOrder, Scheduler, WorkerSequence, late_step, prefill_step, prompt_order
from common.latency import StepModel, StepShape
from common.wire.messages import PrefillRequest

if TYPE_CHECKING:
    from torch import Tensor


STEPS_AHEAD = 2
"""Prompts are admitted when they start within this number of steps. Decode workers grant blocks during the first."""
ON_TIME_S = 5.0
"""Steps of late prompts are small if a prompt was on time in the last seconds. Where none ever is, they would only cost
throughput."""
MAX_TRIES = 16
"""Maximum number of prompts that do not fit tried per step, and of late prompts that determine its size, so that a long
queue does not slow it down."""

LOW_SHARE = 0.75
"""Maximum share of all blocks for prompts of low priority, unless a single one needs more. Priorities below 0, or below
the highest seen so far, are low."""


@dataclass(slots=True, eq=False)
class PrefillSequence(WorkerSequence):
    """A prompt. From admission on, `blocks` covers it completely.

    `num_passing_blocks` are the blocks that others got while it was the oldest waiting prompt and did not fit. A step
    in flight computes the `num_in_flight` tokens after the computed ones. `hidden_sum`, float64 [hidden_size], is the
    sum of the hidden states of all computed tokens, for mean pooling.

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
    """Compute `num_tokens` tokens of `sequence` from `start` on. The last chunk of a prompt samples.

    With `all_logits`, outputs of all tokens are kept: logits for prompt log probabilities, or hidden states for a mean.
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
    """Chunks to compute, and prompts admitted in this step."""

    chunks: Sequence[PrefillChunk]
    admitted: Sequence[PrefillSequence]


class PrefillScheduler(Scheduler[PrefillSequence]):
    """Scheduler of a worker's prompts: `unready`, `waiting`, `running`, or `held` until their KV is acknowledged."""

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
        self.waiting: list[PrefillSequence] = []  # oldest first
        self.held: dict[str, PrefillSequence] = {}
        self._in_flight: dict[PrefillChunk, frozenset[bytes]] = {}  # hashes of the blocks that each chunk fills
        self._top_priority = 0
        self._on_time_at = -math.inf
        self._owned: Counter[int] = Counter()  # blocks of prompts, by priority
        self._num_changes = 0  # of prompts and steps in flight, as far as `_plan` depends on them
        self._planned_at, self._fits = (-1, -1), False

    @property
    def has_work(self) -> bool:
        return any(self._is_ready(sequence) for sequence in self.running) or self._has_fitting

    @property
    def _has_fitting(self) -> bool:
        """Whether a waiting prompt can be admitted. Kept until something changes, because the queue may be long."""
        state = (self.pool.num_changes, self._num_changes)
        if state != self._planned_at:
            self._planned_at = state
            self._fits = any(self._plan(sequence) is not None for sequence in self.waiting)
        return self._fits

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
        """Add a prompt without blocks."""
        self._by_id[sequence.request_id] = sequence
        self._top_priority = max(self._top_priority, sequence.priority)
        self._enqueue(sequence)

    def schedule(
        self, now: float, model: StepModel, restore: Callable[[PrefillSequence], None] = lambda sequence: None
    ) -> SchedulerOutput:
        """Return the next step. Admitted prompts own their blocks from now on. `model` predicts times for their order.

        `restore` may start to read blocks of an admitted prompt; none of it is computed while its `read` is in
        progress.
        """
        prompts = [*(sequence for sequence in self.running if sequence.num_remaining), *self.waiting]
        self.step_tokens = self._step_size(prompts, model)
        order = prompt_order(prompts, now, model, self.max_step_tokens)
        self.step_tokens = self._completing(order)
        if order.num_on_time:
            self._on_time_at = now
        self.late_tokens = self.max_step_tokens
        if order.late and now - self._on_time_at <= ON_TIME_S:
            late = islice(filter(order.is_late, prompts), MAX_TRIES)
            slack_s = min((self._slack_s(prompt, model) for prompt in late), default=None)
            if slack_s is not None:
                self.late_tokens = late_step(model, self._start, self.max_step_tokens, slack_s)
        admitted = self._admit(order, now, restore)
        ready = [sequence for sequence in order.prompts if sequence.blocks and self._is_ready(sequence)]
        chunks = [
            PrefillChunk(sequence, sequence.num_begun, num_tokens)
            for sequence, num_tokens in self._chunks(replace(order, prompts=ready))
        ]
        return SchedulerOutput(chunks, admitted)

    def launched(self, chunk: PrefillChunk) -> None:
        """Record that a step in flight computes `chunk`. The next step continues after it."""
        self._num_changes += 1
        sequence, size = chunk.sequence, self.block_size
        hashes = sequence.hasher.extend(sequence.token_ids)
        self._in_flight[chunk] = frozenset(hashes[chunk.start // size : chunk.end // size])
        sequence.num_in_flight += chunk.num_tokens

    def ended(self, chunk: PrefillChunk) -> bool:
        """Record that the step of `chunk` has ended or failed. Return False if its prompt has ended before.

        Call `advance` for computed chunks afterwards.
        """
        self._num_changes += 1
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
        """Record a computed chunk and publish its full blocks. Return the number of complete blocks of the prompt."""
        self._num_changes += 1
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
        """Return the blocks of an admitted prompt, with holes for those that it gets later."""
        missing = self.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        return [*sequence.blocks, *[HOLE] * missing] if missing else sequence.blocks

    def restored(self, sequence: PrefillSequence, num_blocks: int) -> None:
        super().restored(sequence, num_blocks)
        self._slide(sequence)
        sequence.num_cached = sequence.num_computed
        sequence.num_restored += num_blocks * self.block_size

    def remove(self, sequence: PrefillSequence) -> None:
        """Forget a prompt in any state and release its blocks once no step in flight writes to them."""
        if not self.has(sequence):
            return
        self._check_not_lent(sequence)
        self._num_changes += 1
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

    def _step_size(self, prompts: Sequence[PrefillSequence], model: StepModel) -> Knob:
        has_goals = any(sequence.due_at < math.inf for sequence in prompts)
        return prefill_step(model, self._start, self.most_step_tokens, has_goals=has_goals)

    def _completing(self, order: PromptOrder[PrefillSequence]) -> Knob:
        """Return the step size, extended to the rest of the first prompt if that needs less than two steps.

        Otherwise the rest would share a step with the next prompt, and its first token would wait for that one's chunk.
        Not extended for a prompt that the next step cannot complete.
        """
        if not order.prompts or not self._is_ready(first := order.prompts[0]):
            return self.step_tokens
        size, left = self.max_step_tokens, first.num_remaining
        is_near = size < left < 2 * size and left <= self.most_step_tokens
        if not is_near or order.most_tokens(first, left) < left:
            return self.step_tokens
        return Knob(left, self.step_tokens.reason)

    def _slack_s(self, sequence: PrefillSequence, model: StepModel) -> float:
        """Return how long a prompt like this may wait and meet its goal; 0 if it cannot."""
        own_s = model.steps_s(StepShape.of_prompt(0, sequence.num_tokens), self.most_step_tokens)
        return max(0.0, sequence.due_at - sequence.accepted_at - own_s)

    @property
    def _start(self) -> int:
        """Number of computed tokens of the longest prompt in progress."""
        return max((sequence.num_computed for sequence in self.running), default=0)

    def _enqueue(self, sequence: PrefillSequence) -> None:
        self._num_changes += 1
        if sequence.awaits_grammar:
            self.unready.append(sequence)
        else:
            insort(self.waiting, sequence, key=lambda waiting: waiting.accepted_at)

    def _admit(
        self, order: PromptOrder[PrefillSequence], now: float, restore: Callable[[PrefillSequence], None]
    ) -> list[PrefillSequence]:
        """Admit the prompts that start in one of the next steps."""
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
                continue  # does not use the step's budget yet
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
        """Release the blocks that left the window, and reallocate up to that number for the next chunk."""
        num_before, position = sequence.num_owned, sequence.num_computed
        self._release_before(sequence, self.window.first_block(position))
        wanted = self._table_end(position, sequence.num_tokens) - len(sequence.blocks)
        if wanted > 0:
            sequence.blocks += self.pool.allocate(wanted)
        self._owned[sequence.priority] += sequence.num_owned - num_before

    def _num_new(self, sequence: PrefillSequence, prefix: CachedPrefix) -> int:
        """Return the number of blocks to allocate at admission in addition to `prefix`."""
        return self._table_end(prefix.end * self.block_size, sequence.num_tokens) - prefix.end

    def _num_allocatable(self, prefix: CachedPrefix) -> int:
        """Return the number of blocks that a prompt may allocate in addition to `prefix`."""
        if not self.window:
            return self._num_available(prefix.blocks)
        return self.pool.num_blocks - self._owned.total() - len(prefix.blocks)

    def _plan(self, sequence: PrefillSequence) -> CachedPrefix | None:
        """Return the cached blocks that `sequence` starts with, or None if it cannot be admitted now."""
        if self._is_at_capacity or not self.pool.num_available:
            return None
        prefix = self._cached_prefix(sequence)
        if self._is_in_flight(sequence, prefix.end):
            return None
        num_new = self._num_new(sequence, prefix)
        if num_new > self._num_allocatable(prefix) or self._exceeds_share(sequence):
            return None
        oldest = self.waiting[0]
        if sequence is oldest or self._exceeds_share(oldest) or not self._counts_passing(oldest):
            return prefix
        return prefix if num_new <= self._max_owned(oldest) - oldest.num_passing_blocks else None

    @property
    def _is_at_capacity(self) -> bool:
        """Whether the maximum number of admitted prompts have tokens that are in no completed or launched step."""
        if len(self.running) < self.max_num_seqs:
            return False
        return sum(sequence.num_remaining > 0 for sequence in self.running) >= self.max_num_seqs

    def _is_in_flight(self, sequence: PrefillSequence, index: int) -> bool:
        """Whether a step in flight computes block `index` of a waiting prompt, which can then share it."""
        is_shared = self.pool.enable_prefix_caching and index < sequence.num_cacheable // self.block_size
        if not self._in_flight or not is_shared:
            return False
        block_hash = sequence.hasher.hashes[index]
        return any(block_hash in hashes for hashes in self._in_flight.values())

    def _max_owned(self, sequence: PrefillSequence) -> int:
        """Return the maximum number of blocks that a prompt owns at once."""
        return min(self._most_owned, self.blocks_for(sequence.num_tokens))

    def _exceeds_share(self, sequence: PrefillSequence) -> bool:
        """Whether a prompt must wait for others of low priority, whose decode workers may be full."""
        if sequence.priority >= self._top_priority:
            return False
        owned = sum(num_blocks for priority, num_blocks in self._owned.items() if priority < self._top_priority)
        return owned > 0 and owned + self._max_owned(sequence) > LOW_SHARE * self.pool.num_blocks

    def _counts_passing(self, oldest: PrefillSequence) -> bool:
        """Whether to count blocks that others get: the oldest waiting prompt does not fit, or did not before."""
        prefix = self._cached_prefix(oldest)
        return oldest.num_passing_blocks > 0 or self._num_new(oldest, prefix) > self._num_allocatable(prefix)
