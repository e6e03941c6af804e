"""Decides when a draft model or head drafts, how many tokens, and when it catches up with sequences.

A sequence whose KV came from another worker has no draft KV. The draft model computes it in chunks, preferably while
the worker is idle, for example while the prompt's KV is in transfer, and otherwise between the steps of other sequences
if the expected gain is worth the time. Until then, the sequence uses drafts without cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from common.engine.kv import BlockCounts
from common.engine.sequences import TokenGoal
from common.errors import BlockError
from common.observe import Ewma
from decode_worker.drafting.draft_tokens import FORCED, NOTHING, AcceptanceRates, Draft, of_model
from decode_worker.drafting.row_costs import Depth, RowCosts, StepSize, best_depth, longest

if TYPE_CHECKING:
    from decode_worker.rules import DecodeRules
    from decode_worker.scheduler import DecodeChunk
    from decode_worker.sequence import DecodeSequence

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_MODEL_SEQUENCES = 64
"""Maximum batch size with drafts. In larger batches, a row costs as much as a token gains."""
IDLE_CHUNK_S = 0.02
"""Duration of one catch-up on an idle worker, in seconds. An arriving request waits for its end."""
MIN_IDLE_TOKENS, MAX_IDLE_TOKENS = 16, 512
"""Limits of the tokens per catch-up on an idle worker."""
MIN_STEP_TOKENS = 8
"""Minimum tokens per catch-up between steps. Each step adds at least one token."""
MAX_WAITING_TRIED = 16
"""Maximum number of waiting sequences considered for catching up."""
NO_BLOCKS_PAUSE_S = 1.0
"""Pause after a catch-up without free blocks, in seconds."""
DEFAULT_ANSWER_TOKENS = 128
"""Assumed number of tokens of an answer before any has ended."""
ANSWER_SMOOTHING = 0.05
"""Weight of a new answer in the average length."""


class TokenDrafter(Protocol):
    """Computes draft tokens: a draft model, or a head of the served model.

    Not thread-safe; no step may be in flight while it computes.
    """

    @property
    def costs(self) -> RowCosts:
        """Times of its steps by number of rows."""

    @property
    def counts(self) -> BlockCounts:
        """Usage of its blocks. A head has none, because its KV is in the served model's."""

    @property
    def token_s(self) -> float:
        """Seconds per token when catching up, or 0 if unknown."""

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether it can draft for the sequence immediately."""

    def num_behind(self, sequence: DecodeSequence) -> int:
        """Return the number of tokens to catch up before drafting, or 0 if it is ready or can never draft."""

    def catch_up(self, sequence: DecodeSequence, most_tokens: int) -> int:
        """Compute draft KV of the sequence's next tokens. Return their number, or 0 if there are no free blocks."""

    def draft(
        self, wanted: Sequence[tuple[DecodeSequence, int]], rules: DecodeRules
    ) -> dict[DecodeSequence, tuple[int, ...]]:
        """Draft up to the given number of tokens per sequence. All their tokens must be known. Some may get none."""

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Forget sequences for which `is_here` is False."""

    def reset(self) -> None:
        """Drop cached KV without an owner."""

    def check_integrity(self) -> None:
        """Raise BlockError unless each owned block belongs to a known sequence."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of drafts: `max_tokens` per sequence (0: none), `max_rows` per step, and the `goal` for its duration."""

    max_tokens: int
    max_rows: int
    goal: TokenGoal


class ModelDrafts:
    """Draft tokens of a draft model or head, for the sequences of one engine. Not thread-safe."""

    def __init__(
        self, drafter: TokenDrafter, rules: DecodeRules, bounds: DraftLimits, rates: AcceptanceRates, steps: RowCosts
    ) -> None:
        """`rates` (acceptance) and `steps` (costs of rows) are shared, and updated by the caller."""
        self._drafter, self._rules, self._bounds = drafter, rules, bounds
        self._rates, self._steps = rates, steps
        self._answer_tokens = Ewma(ANSWER_SMOOTHING, start=DEFAULT_ANSWER_TOKENS)
        self._has_failed = False
        self._no_room_until = 0.0
        self.spent_s = self.total_s = 0.0
        """Seconds that the draft model computed before the last step, and in total."""

    @property
    def counts(self) -> BlockCounts:
        return self._drafter.counts

    def wants_tokens(self, running: Sequence[DecodeSequence]) -> bool:
        """Whether the next step should start from known tokens, to draft after them or to catch up."""
        decoding = [each for each in running if each.num_remaining == 1]
        if self._has_failed or not 0 < len(decoding) <= MAX_MODEL_SEQUENCES:
            return False
        num_ready = sum(self._drafter.is_ready(each) for each in decoding)
        if self._depth(len(decoding), num_ready).num_tokens:
            return True
        self._rates.forget_model()
        self._drafter.costs.relax()
        return self._catch_up_candidate(decoding) is not None

    def extend(
        self,
        chunks: Sequence[DecodeChunk],
        drafts: Sequence[Draft],
        room: Callable[[DecodeSequence, int], int],
        other_rate: float,
    ) -> Sequence[Draft]:
        """Replace `drafts`, which cost nothing, by those of the model where they gain more.

        `other_rate` is the expected rate of the step with `drafts`, in tokens per second, or 0 if they do not pay.
        """
        if self._has_failed or not 0 < len(chunks) <= MAX_MODEL_SEQUENCES:
            return drafts
        able = [index for index, chunk in enumerate(chunks) if self._may(chunk, drafts[index])]
        whole = self._depth(len(chunks), len(able)).num_tokens
        gain = sum(self._rates.of_model(whole))
        gains = [sum(self._rates.chances(draft)) for draft in drafts]
        drafting = [index for index in able if gains[index] < gain]
        others = set(range(len(chunks))) - set(drafting)
        size = StepSize(
            len(chunks),
            len(chunks) + sum(len(drafts[index].token_ids) for index in others),
            len(chunks) + sum(gains[index] for index in others),
        )
        depth = self._depth(len(chunks), len(drafting), size, other_rate).num_tokens
        wanted: list[tuple[DecodeSequence, int]] = []
        for index in drafting if depth else ():
            sequence = chunks[index].sequence
            limit = self._rules.num_drafts(sequence, depth)
            wanted.append((sequence, room(sequence, limit) if limit > 0 else 0))
        drafted: dict[DecodeSequence, tuple[int, ...]] = {}
        if wanted:
            drafted = self._timed(lambda: self._drafter.draft(wanted, self._rules), drafted)
        return [
            self._as_draft(chunk.sequence, drafted[chunk.sequence]) if chunk.sequence in drafted else draft
            for chunk, draft in zip(chunks, drafts, strict=True)
        ]

    def begin(self) -> None:
        """Reset the time of the current step."""
        self.spent_s = 0.0

    def catch_up(self, running: Sequence[DecodeSequence], idle: DecodeSequence | None) -> None:
        """Catch up with a running sequence if it is worth the time, or with the `idle` worker's sequence."""
        if idle is not None:
            self._catch_up_idle(idle)
            return
        decoding = [each for each in running if each.num_remaining == 1]
        if self._has_failed or not decoding or (sequence := self._catch_up_candidate(decoding)) is None:
            return
        plain_s = self._steps.seconds(len(decoding))
        budget_s = longest(plain_s, self._bounds.goal) - plain_s
        token_s = self._drafter.token_s
        self._compute(sequence, max(MIN_STEP_TOKENS, int(budget_s / token_s)) if token_s else MIN_IDLE_TOKENS)

    def next_idle(self, sequences: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """Return the sequence to catch up with while the worker is idle, or None."""
        if self._has_failed or time.monotonic() < self._no_room_until:
            return None
        if self._steps.seconds(1) and not self._depth(1, 1).num_tokens:
            return None  # it would not draft for a single sequence
        waiting = islice((each for each in sequences if each.waits_to_run), MAX_WAITING_TRIED)
        return next((each for each in waiting if self._drafter.num_behind(each)), None)

    def _catch_up_idle(self, sequence: DecodeSequence) -> None:
        token_s = self._drafter.token_s
        most = min(MAX_IDLE_TOKENS, max(MIN_IDLE_TOKENS, int(IDLE_CHUNK_S / token_s))) if token_s else MIN_IDLE_TOKENS
        self._compute(sequence, most)

    def answered(self, num_tokens: int) -> None:
        """Record the length of a finished answer."""
        self._answer_tokens.observe(num_tokens)

    def retain(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Release the draft KV of sequences that are gone, preempted or leaving."""
        self._drafter.retain(lambda each: not self._has_failed and has(each) and (each.runs or each.waits_to_run))

    def reset(self) -> None:
        self._drafter.reset()

    def check_integrity(self) -> None:
        self._drafter.check_integrity()

    def _may(self, chunk: DecodeChunk, draft: Draft) -> bool:
        """Whether the model can draft after a chunk: its token is known, and no grammar forces the next one."""
        sequence = chunk.sequence
        if sequence.num_pending or draft.kinds[:1] == (FORCED,):
            return False
        return self._rules.num_drafts(sequence, self._bounds.max_tokens) > 0 and self._drafter.is_ready(sequence)

    def _depth(
        self, num_sequences: int, num_drafting: int, size: StepSize | None = None, other_rate: float = 0.0
    ) -> Depth:
        return best_depth(
            self._steps,
            self._drafter.costs,
            size or StepSize.plain(num_sequences),
            num_drafting,
            self._rates.of_model(self._bounds.max_tokens),
            self._bounds.goal,
            most_rows=self._bounds.max_rows,
            other_rate=other_rate,
        )

    def _as_draft(self, sequence: DecodeSequence, token_ids: tuple[int, ...]) -> Draft:
        possible = self._rules.num_possible(sequence, token_ids)
        return of_model(token_ids[:possible]) if possible else NOTHING

    def _catch_up_candidate(self, decoding: Sequence[DecodeSequence]) -> DecodeSequence | None:
        """Return the sequence to catch up with first, if drafting for it gains more than catching up costs."""
        behind = [(num, each) for each in decoding if (num := self._drafter.num_behind(each))]
        if not behind or time.monotonic() < self._no_room_until:
            return None
        num_behind, sequence = min(behind, key=lambda each: each[0])
        count = len(decoding)
        plain_s = self._steps.seconds(count)
        if not plain_s:
            return None
        num_ready = count - len(behind)
        more = self._depth(count, num_ready + 1).rate - self._depth(count, num_ready).rate  # tokens per second
        gained = more * self._expected_more(sequence) * plain_s
        lost = num_behind * self._drafter.token_s * count / plain_s
        return sequence if gained > lost else None

    def _expected_more(self, sequence: DecodeSequence) -> float:
        """Return the expected number of further tokens: at least the number so far."""
        num_output, left = sequence.num_output_tokens, sequence.params.max_tokens - sequence.num_output_tokens
        return min(left, max(self._answer_tokens.value - num_output, num_output))

    def _compute(self, sequence: DecodeSequence, most_tokens: int) -> None:
        if not self._timed(lambda: self._drafter.catch_up(sequence, most_tokens), 0):
            self._no_room_until = time.monotonic() + NO_BLOCKS_PAUSE_S

    def _timed(self, compute: Callable[[], T], nothing: T) -> T:
        """Run `compute` and record its time. If it fails, disable the draft model."""
        began = time.perf_counter()
        try:
            return compute()
        except BlockError:
            raise  # block ownership is corrupt
        except Exception:
            log.exception("draft model failed, this worker decodes without it until it is restarted")
            self._has_failed = True
            return nothing
        finally:
            took_s = time.perf_counter() - began
            self.spent_s, self.total_s = self.spent_s + took_s, self.total_s + took_s
