"""Speculative decoding: decides how many tokens a step drafts, to maximise the tokens per second of this machine.

Draft tokens come from the sequence's text or grammar without cost, or from a draft model or head (`drafting/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from common.engine.kv import BlockCounts
from common.engine.sequences import Knob
from decode_worker.drafting.draft_tokens import FORCED, NOTHING, AcceptanceRates, Draft, PromptLookup, num_accepted
from decode_worker.drafting.model_drafts import MAX_MODEL_SEQUENCES, DraftLimits, ModelDrafts
from decode_worker.drafting.row_costs import MIN_CHANCE, RowCosts
from decode_worker.rules import DecodeRules
from decode_worker.scheduler import DecodeChunk
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:  # loads torch
    from decode_worker.drafting.model_drafts import TokenDrafter

MAX_SEQUENCES = 32
"""Maximum batch size with drafts from the text. In larger ones, the search costs more than it saves."""


class Speculation:
    """Drafts tokens for the sequences of one engine, and learns their acceptance rates."""

    def __init__(self, rules: DecodeRules, bounds: DraftLimits, drafter: TokenDrafter | None = None) -> None:
        self._rules, self._goal = rules, bounds.goal
        self._max_tokens, self._max_rows = bounds.max_tokens, bounds.max_rows
        self._rates, self._costs = AcceptanceRates(), RowCosts()
        self._knob = Knob(0, "cost" if bounds.max_tokens else "bound")
        self._model: ModelDrafts | None = None
        if drafter is not None and bounds.max_tokens:
            self._model = ModelDrafts(drafter, rules, bounds, self._rates, self._costs)
        self._most_sequences = MAX_SEQUENCES if self._model is None else MAX_MODEL_SEQUENCES

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """Number of tokens that the last step drafted for all of its sequences."""
        return {"draft_tokens": self._knob}

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def drafting_s(self) -> float:
        """Seconds that a draft model computed before the last step."""
        return self._model.spent_s if self._model is not None else 0.0

    @property
    def total_drafting_s(self) -> float:
        """Seconds that a draft model computed in total."""
        return self._model.total_s if self._model is not None else 0.0

    @property
    def draft_blocks(self) -> BlockCounts:
        """Usage of the draft model's KV blocks."""
        return self._model.counts if self._model is not None else BlockCounts(0, 0, 0)

    def wants_tokens(self, running: Sequence[DecodeSequence]) -> bool:
        """Whether the next step should start from known tokens, so that a model drafts or a grammar forces some."""
        if self._model is not None and self._model.wants_tokens(running):
            return True
        is_possible = self._max_tokens and len(running) <= min(MAX_SEQUENCES, self._max_rows - 1)
        if not is_possible or all(each.constraint is None or each.constraint.is_slow for each in running):
            return False
        return bool(self._costs.worthwhile(len(running), [1.0], self._goal))

    def next_idle(self, sequences: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """Return the sequence whose draft KV to compute while the worker is idle, or None."""
        return self._model.next_idle(sequences) if self._model is not None else None

    def extend(
        self,
        chunks: Sequence[DecodeChunk],
        room: Callable[[DecodeSequence, int], int],
        *,
        may_compute: bool = False,
        idle: DecodeSequence | None = None,
    ) -> Sequence[DecodeChunk]:
        """Return the chunks, some of them with draft tokens.

        `room(sequence, n)` returns how many of n draft tokens fit. With `may_compute` (no step is in flight), a draft
        model drafts first, and catches up with one of the sequences, or with the `idle` worker's sequence.
        """
        if self._model is not None:
            self._model.begin()
            if may_compute:
                self._model.catch_up([chunk.sequence for chunk in chunks], idle)
        drafts = self._drafts(chunks, room, may_compute=may_compute)
        candidates = sorted(
            (-chance, place, index)
            for index, draft in enumerate(drafts)
            for place, chance in enumerate(self._rates.chances(draft))
            if chance >= MIN_CHANCE
        )
        del candidates[self._max_rows - len(chunks) :]
        taken = [0] * len(chunks)
        chances = [-chance for chance, _, _ in candidates]
        best = self._costs.worthwhile(len(chunks), chances, self._goal, self._patience(drafts)) if chances else 0
        self._knob = Knob(best, "gain" if best else "cost" if self._max_tokens else "bound")
        if not best:
            return chunks
        for _, _, index in candidates[:best]:
            taken[index] += 1
        return [
            chunk._replace(draft=draft.first(count)) if count else chunk
            for chunk, draft, count in zip(chunks, drafts, taken, strict=True)
        ]

    def learn(self, chunk: DecodeChunk, sampled: Sequence[int]) -> int:
        """Learn from the `sampled` tokens of all rows of a chunk. Return how many of its draft tokens were accepted."""
        draft = chunk.draft
        count = num_accepted(draft, sampled)
        if draft.token_ids:
            chunk.sequence.draft_stats.add(len(draft.token_ids), count)
            seen = chunk.sequence.token_ids[chunk.start + 1 - len(draft.unseen) : chunk.start + 1]
            self._rates.learn(draft, [*seen, *sampled[: count + 1]])
        return count

    def stepped(self, chunks: Sequence[DecodeChunk], step_s: float) -> None:
        """Learn the duration of a step of these chunks."""
        if self._max_tokens and len(chunks) <= self._most_sequences and all(chunk.num_tokens == 1 for chunk in chunks):
            self._costs.add(sum(chunk.num_rows for chunk in chunks), step_s)

    def answered(self, sequence: DecodeSequence) -> None:
        """Record the length of a finished sequence."""
        if self._model is not None:
            self._model.answered(sequence.num_output_tokens)

    def retain(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Release the draft KV of sequences that are gone, preempted or leaving."""
        if self._model is not None:
            self._model.retain(has)

    def reset_cache(self) -> None:
        """Drop draft KV without an owner."""
        if self._model is not None:
            self._model.reset()

    def check_integrity(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Raise BlockError unless each owned block of the draft KV belongs to a known sequence."""
        if self._model is not None:
            self._model.retain(has)
            self._model.check_integrity()

    def _drafts(
        self, chunks: Sequence[DecodeChunk], room: Callable[[DecodeSequence, int], int], *, may_compute: bool
    ) -> Sequence[Draft]:
        """Return the draft of each chunk, or () if there is none for any."""
        if not self._max_tokens or not 0 < len(chunks) <= min(self._most_sequences, self._max_rows - 1):
            return ()
        if not all(chunk.sample and chunk.num_tokens == 1 for chunk in chunks):
            return ()
        # Skips the search unless a draft token that is certainly accepted would pay.
        pays = len(chunks) <= MAX_SEQUENCES and self._costs.worthwhile(len(chunks), [1.0], self._goal)
        drafts = [self._draft_for(chunk.sequence, room) for chunk in chunks] if pays else [NOTHING] * len(chunks)
        if self._model is None or not may_compute:
            return drafts
        chances = sorted((chance for draft in drafts for chance in self._rates.chances(draft)), reverse=True)
        best = self._costs.worthwhile(len(chunks), chances, self._goal)
        rate = self._costs.rate(len(chunks), chances[:best]) if best else 0.0
        return self._model.extend(chunks, drafts, room, rate)

    def _patience(self, drafts: Sequence[Draft]) -> float:
        """Return the minimum expected tokens per sequence. Above one only if a model has drafted."""
        if all(draft.source != "model" for draft in drafts):
            return 1.0
        return 1.0 + min(sum(self._rates.chances(draft)) for draft in drafts)

    def _draft_for(self, sequence: DecodeSequence, room: Callable[[DecodeSequence, int], int]) -> Draft:
        num_tokens, constraint = self._rules.num_drafts(sequence, self._max_tokens), sequence.constraint
        if num_tokens < 1 or (constraint is not None and sequence.num_pending):
            return NOTHING  # a grammar needs all preceding tokens
        forced = constraint.forced(sequence.output_token_ids)[:num_tokens] if constraint else []
        if forced:
            draft = Draft(tuple(forced), (), (FORCED,) * len(forced))
        else:
            sequence.lookup = sequence.lookup or PromptLookup()
            draft = sequence.lookup.draft_for(sequence.token_ids, sequence.num_pending, num_tokens)
            draft = draft.first(self._rules.num_possible(sequence, draft.token_ids))
        return draft.first(room(sequence, len(draft.token_ids))) if draft.token_ids else NOTHING
