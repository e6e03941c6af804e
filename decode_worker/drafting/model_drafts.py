"""Decides when a draft model or head drafts, how many tokens, and when it catches up with sequences it has no KV of.

A sequence whose KV came from a prefill worker, or from another decode worker, has no draft KV. The model computes it in
chunks: at best while the worker has nothing else to compute, as when the prompt's own KV is still on its way; else
beside the steps of others, where what drafting will bring is worth the time. Until then the sequence has the drafts
that cost nothing.
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
from decode_worker.drafting.draft_tokens import FORCED, NOTHING, Draft, HitRates, of_model
from decode_worker.drafting.row_costs import Depth, RowCosts, StepSize, best_depth, longest

if TYPE_CHECKING:
    from decode_worker.rules import DecodeRules
    from decode_worker.scheduler import DecodeChunk
    from decode_worker.sequence import DecodeSequence

T = TypeVar("T")
log = logging.getLogger(__name__)
MOST_SEQUENCES = 64
"""Larger batches draft nothing: their rows cost what a token brings."""
IDLE_CHUNK_S = 0.02
"""How long an idle worker computes draft KV in a row: a request that comes waits for the end of it."""
LEAST_AT_ONCE, MOST_AT_ONCE = 16, 512
"""Tokens that are caught up with at once, while the worker is idle."""
LEAST_BESIDE = 8
"""Tokens that are caught up with beside a step, which itself adds one or some."""
MOST_WAITING = 16
"""How many waiting sequences are considered for catching up."""
NO_ROOM_S = 1.0
"""How long no sequence is caught up with after the draft cache had no room for one."""
USUAL_ANSWER = 128
"""Tokens that an answer is taken to have before some have ended."""
ANSWER_SMOOTHING = 0.05
"""The share of one more answer in the mean number of tokens of answers."""


class TokenDrafter(Protocol):
    """Drafts tokens by computing them: a draft model, or a head of the served model.

    Belongs to the engine's thread; no step may be in flight while it computes.
    """

    @property
    def costs(self) -> RowCosts:
        """The time of its steps, by their rows."""

    @property
    def counts(self) -> BlockCounts:
        """How its own blocks are used; it has none if its KV lies in the served model's."""

    @property
    def token_s(self) -> float:
        """Seconds that a token takes to catch up with; 0 while nothing is known."""

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether it can draft for the sequence right away."""

    def num_behind(self, sequence: DecodeSequence) -> int:
        """How many tokens of the sequence it has to catch up with before it can draft; 0 if it is ready or never is."""

    def catch_up(self, sequence: DecodeSequence, most_tokens: int) -> int:
        """Compute draft KV of the sequence's next tokens. Returns of how many; 0 while there is no room."""

    def draft(
        self, wanted: Sequence[tuple[DecodeSequence, int]], rules: DecodeRules
    ) -> dict[DecodeSequence, tuple[int, ...]]:
        """Draft up to the wanted number of tokens for each sequence. All their tokens are known. Some may get none."""

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Forget sequences that are not here any more."""

    def reset(self) -> None:
        """Forget what no sequence owns."""

    def check_integrity(self) -> None:
        """Raises BlockError unless each owned block belongs to a sequence that is here."""


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """A sequence gets up to `max_tokens` draft tokens, 0 for none. A step has at most `max_rows`, and keeps `goal`."""

    max_tokens: int
    max_rows: int
    goal: TokenGoal


class ModelDrafts:
    """The draft tokens of a model, for the sequences of one engine. Belongs to the engine's thread."""

    def __init__(
        self, drafter: TokenDrafter, rules: DecodeRules, bounds: DraftBounds, rates: HitRates, steps: RowCosts
    ) -> None:
        """`rates` and `steps` are learnt from by others: how often tokens are accepted, what rows of a step cost."""
        self._drafter, self._rules, self._bounds = drafter, rules, bounds
        self._rates, self._steps = rates, steps
        self._answer_tokens = Ewma(ANSWER_SMOOTHING, start=USUAL_ANSWER)
        self._has_failed = False
        self._no_room_until = 0.0
        self.spent_s = self.total_s = 0.0
        """Seconds that the model computed before the last step, and since the start."""

    @property
    def counts(self) -> BlockCounts:
        return self._drafter.counts

    def wants_tokens(self, running: Sequence[DecodeSequence]) -> bool:
        """Whether the next step would better begin from known tokens: to draft behind them, or to catch up."""
        decoding = [each for each in running if each.num_remaining == 1]
        if self._has_failed or not 0 < len(decoding) <= MOST_SEQUENCES:
            return False
        num_ready = sum(self._drafter.is_ready(each) for each in decoding)
        if self._depth(len(decoding), num_ready).num_tokens:
            return True
        self._rates.forget_model()
        self._drafter.costs.relax()
        return self._lagging(decoding) is not None

    def extend(
        self,
        chunks: Sequence[DecodeChunk],
        drafts: Sequence[Draft],
        room: Callable[[DecodeSequence, int], int],
        other_rate: float,
    ) -> Sequence[Draft]:
        """The drafts of a step's sequences: those of the model where they pay more than `drafts`, which cost nothing.

        `other_rate`: tokens a second that the step is expected to bring with `drafts`; 0 if they do not pay.
        """
        if self._has_failed or not 0 < len(chunks) <= MOST_SEQUENCES:
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
        """Another step begins."""
        self.spent_s = 0.0

    def catch_up(self, running: Sequence[DecodeSequence], idle: DecodeSequence | None) -> None:
        """Catch up for a while: with a running sequence if that is worth it, or with the `idle` worker's one."""
        if idle is not None:
            self._catch_up_idle(idle)
            return
        decoding = [each for each in running if each.num_remaining == 1]
        if self._has_failed or not decoding or (sequence := self._lagging(decoding)) is None:
            return
        plain_s = self._steps.seconds(len(decoding))
        budget_s = longest(plain_s, self._bounds.goal) - plain_s
        token_s = self._drafter.token_s
        self._compute(sequence, max(LEAST_BESIDE, int(budget_s / token_s)) if token_s else LEAST_AT_ONCE)

    def next_idle(self, sequences: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """The sequence to catch up with while the worker has nothing else to compute."""
        if self._has_failed or time.monotonic() < self._no_room_until:
            return None
        if self._steps.seconds(1) and not self._depth(1, 1).num_tokens:
            return None  # it would not draft for one that is alone
        waiting = islice((each for each in sequences if each.waits_to_run), MOST_WAITING)
        return next((each for each in waiting if self._drafter.num_behind(each)), None)

    def _catch_up_idle(self, sequence: DecodeSequence) -> None:
        token_s = self._drafter.token_s
        most = min(MOST_AT_ONCE, max(LEAST_AT_ONCE, int(IDLE_CHUNK_S / token_s))) if token_s else LEAST_AT_ONCE
        self._compute(sequence, most)

    def answered(self, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._answer_tokens.observe(num_tokens)

    def retain(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Release the draft KV of sequences that are gone, preempted or about to leave."""
        self._drafter.retain(lambda each: not self._has_failed and has(each) and (each.runs or each.waits_to_run))

    def reset(self) -> None:
        self._drafter.reset()

    def check_integrity(self) -> None:
        self._drafter.check_integrity()

    def _may(self, chunk: DecodeChunk, draft: Draft) -> bool:
        """Whether the model can draft behind a chunk: its token is known, and no grammar forces the next one."""
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

    def _lagging(self, decoding: Sequence[DecodeSequence]) -> DecodeSequence | None:
        """The sequence with which to catch up first, if drafting for it brings more than catching up costs."""
        behind = [(num, each) for each in decoding if (num := self._drafter.num_behind(each))]
        if not behind or time.monotonic() < self._no_room_until:
            return None
        num_behind, sequence = min(behind, key=lambda each: each[0])
        count = len(decoding)
        plain_s = self._steps.seconds(count)
        if not plain_s:
            return None
        num_ready = count - len(behind)
        more = self._depth(count, num_ready + 1).rate - self._depth(count, num_ready).rate  # tokens a second
        gained = more * self._expected_more(sequence) * plain_s
        lost = num_behind * self._drafter.token_s * count / plain_s
        return sequence if gained > lost else None

    def _expected_more(self, sequence: DecodeSequence) -> float:
        """Tokens that the sequence may be expected to get still: at least as many as it has got."""
        num_output, left = sequence.num_output_tokens, sequence.params.max_tokens - sequence.num_output_tokens
        return min(left, max(self._answer_tokens.value - num_output, num_output))

    def _compute(self, sequence: DecodeSequence, most_tokens: int) -> None:
        if not self._timed(lambda: self._drafter.catch_up(sequence, most_tokens), 0):
            self._no_room_until = time.monotonic() + NO_ROOM_S

    def _timed(self, compute: Callable[[], T], nothing: T) -> T:
        """Run `compute` and count its time. If it fails the worker goes on without the draft model."""
        began = time.perf_counter()
        try:
            return compute()
        except BlockError:
            raise  # ownership is broken
        except Exception:
            log.exception("the draft model failed: this worker goes on without it")
            self._has_failed = True
            return nothing
        finally:
            took_s = time.perf_counter() - began
            self.spent_s, self.total_s = self.spent_s + took_s, self.total_s + took_s
