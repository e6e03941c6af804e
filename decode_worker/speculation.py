"""Decides how many tokens a step drafts: as many as bring the most tokens a second on this machine.

They come from the sequence's own text or grammar at no cost, or from a draft model (`drafting/`), whose steps take
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from common.engine.kv import BlockCounts
from common.engine.sequences import Knob
from decode_worker.drafting.draft_tokens import FORCED, NOTHING, Draft, HitRates, Lookup, num_accepted
from decode_worker.drafting.model_drafts import MOST_SEQUENCES, DraftBounds, ModelDrafts
from decode_worker.drafting.row_costs import LEAST_CHANCE, RowCosts
from decode_worker.rules import DecodeRules
from decode_worker.scheduler import DecodeChunk
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:  # torch
    from decode_worker.drafting.model_drafts import TokenDrafter

MAX_SEQUENCES = 32
"""Larger batches draft nothing: a row costs what a token brings, and the search for draft tokens more than it saves."""


class Speculation:
    """Drafts tokens for the sequences of one engine, and learns which are accepted."""

    def __init__(self, rules: DecodeRules, bounds: DraftBounds, drafter: TokenDrafter | None = None) -> None:
        self._rules, self._goal = rules, bounds.goal
        self._max_tokens, self._max_rows = bounds.max_tokens, bounds.max_rows
        self._rates, self._costs = HitRates(), RowCosts()
        self._knob = Knob(0, "cost" if bounds.max_tokens else "bound")
        self._model: ModelDrafts | None = None
        if drafter is not None and bounds.max_tokens:
            self._model = ModelDrafts(drafter, rules, bounds, self._rates, self._costs)
        self._most_sequences = MAX_SEQUENCES if self._model is None else MOST_SEQUENCES

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """How many tokens the last step drafted, for all of its sequences."""
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
        """Seconds that a draft model computed since the start."""
        return self._model.total_s if self._model is not None else 0.0

    @property
    def draft_blocks(self) -> BlockCounts:
        """How the blocks of the draft model's KV are used."""
        return self._model.counts if self._model is not None else BlockCounts(0, 0, 0)

    def wants_tokens(self, running: Sequence[DecodeSequence]) -> bool:
        """Whether the next step should begin from known tokens: a draft model computes, or a grammar may force some."""
        if self._model is not None and self._model.wants_tokens(running):
            return True
        is_possible = self._max_tokens and len(running) <= min(MAX_SEQUENCES, self._max_rows - 1)
        if not is_possible or all(each.constraint is None or each.constraint.is_slow for each in running):
            return False
        return bool(self._costs.worthwhile(len(running), [1.0], self._goal))

    def next_idle(self, sequences: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """The sequence whose draft KV is to be computed while nothing else is."""
        return self._model.next_idle(sequences) if self._model is not None else None

    def extend(
        self,
        chunks: Sequence[DecodeChunk],
        room: Callable[[DecodeSequence, int], int],
        *,
        may_compute: bool = False,
        idle: DecodeSequence | None = None,
    ) -> Sequence[DecodeChunk]:
        """The same step, with draft tokens behind the tokens of some sequences.

        `room(sequence, n)` says for how many of n draft tokens there is room. If it `may_compute`, as no step is in
        flight, a draft model drafts first, and catches up with one of the sequences or with that of an `idle` worker.
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
            if chance >= LEAST_CHANCE
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
        """Learn from the `sampled` tokens of all of a chunk's rows; how many of its draft tokens were accepted."""
        draft = chunk.draft
        count = num_accepted(draft, sampled)
        if draft.token_ids:
            chunk.sequence.tally.add(len(draft.token_ids), count)
            seen = chunk.sequence.token_ids[chunk.start + 1 - len(draft.unseen) : chunk.start + 1]
            self._rates.learn(draft, [*seen, *sampled[: count + 1]])
        return count

    def stepped(self, chunks: Sequence[DecodeChunk], step_s: float) -> None:
        """Learn how long a step of these chunks took."""
        if self._max_tokens and len(chunks) <= self._most_sequences and all(chunk.num_tokens == 1 for chunk in chunks):
            self._costs.add(sum(chunk.num_rows for chunk in chunks), step_s)

    def answered(self, sequence: DecodeSequence) -> None:
        """A sequence has ended."""
        if self._model is not None:
            self._model.answered(sequence.num_output_tokens)

    def retain(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Release the draft KV of sequences that are gone, preempted or about to leave."""
        if self._model is not None:
            self._model.retain(has)

    def reset_cache(self) -> None:
        """Forget draft KV that no sequence owns."""
        if self._model is not None:
            self._model.reset()

    def check_integrity(self, has: Callable[[DecodeSequence], bool]) -> None:
        """Raises BlockError unless each owned block of the draft KV belongs to a sequence that is here."""
        if self._model is not None:
            self._model.retain(has)
            self._model.check_integrity()

    def _drafts(
        self, chunks: Sequence[DecodeChunk], room: Callable[[DecodeSequence, int], int], *, may_compute: bool
    ) -> Sequence[Draft]:
        """What may be drafted behind each of the chunks; empty where nothing may behind any."""
        if not self._max_tokens or not 0 < len(chunks) <= min(self._most_sequences, self._max_rows - 1):
            return ()
        if not all(chunk.sample and chunk.num_tokens == 1 for chunk in chunks):
            return ()
        # Whether a draft token that is surely accepted would pay. If not, there is no search.
        pays = len(chunks) <= MAX_SEQUENCES and self._costs.worthwhile(len(chunks), [1.0], self._goal)
        drafts = [self._draft_for(chunk.sequence, room) for chunk in chunks] if pays else [NOTHING] * len(chunks)
        if self._model is None or not may_compute:
            return drafts
        chances = sorted((chance for draft in drafts for chance in self._rates.chances(draft)), reverse=True)
        best = self._costs.worthwhile(len(chunks), chances, self._goal)
        rate = self._costs.rate(len(chunks), chances[:best]) if best else 0.0
        return self._model.extend(chunks, drafts, room, rate)

    def _patience(self, drafts: Sequence[Draft]) -> float:
        """Tokens that each sequence of a step is expected to get: more than one only where a model drafted for some."""
        if all(draft.source != "model" for draft in drafts):
            return 1.0
        return 1.0 + min(sum(self._rates.chances(draft)) for draft in drafts)

    def _draft_for(self, sequence: DecodeSequence, room: Callable[[DecodeSequence, int], int]) -> Draft:
        num_tokens, constraint = self._rules.num_drafts(sequence, self._max_tokens), sequence.constraint
        if num_tokens < 1 or (constraint is not None and sequence.num_pending):
            return NOTHING  # no grammar says what follows a token that is not known
        forced = constraint.forced(sequence.output_token_ids)[:num_tokens] if constraint else []
        if forced:
            draft = Draft(tuple(forced), (), (FORCED,) * len(forced))
        else:
            sequence.lookup = sequence.lookup or Lookup()
            draft = sequence.lookup.draft_for(sequence.token_ids, sequence.num_pending, num_tokens)
            draft = draft.first(self._rules.num_possible(sequence, draft.token_ids))
        return draft.first(room(sequence, len(draft.token_ids))) if draft.token_ids else NOTHING
