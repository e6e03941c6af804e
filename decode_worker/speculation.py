"""Decides how many tokens a step drafts: as many as bring the most tokens a second on this machine. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from common.requests.step_budget import Knob
from common.requests.token_goal import TokenGoal
from decode_worker.draft_tokens import FORCED, NOTHING, Draft, HitRates, Lookup, num_accepted
from decode_worker.rules import DecodeRules
from decode_worker.sequence import DecodeSequence
from decode_worker.step import DecodeChunk

MAX_SEQUENCES = 32
"""In larger batches a row costs what a token brings, and the search for draft tokens takes longer than it saves."""
LEAST_CHANCE = 0.1
"""Of acceptance, for a draft token to be considered."""
LEAST_GAIN = 1.05
"""In tokens a second, for draft tokens to pay: the step behind them is not launched ahead."""
SLOWEST = 1.5
"""A step may take so many times as long with draft tokens: sequences without any wait as long, too. With a goal for the
time of a token, a step that would keep it may take as long as that allows."""
NO_GOAL = TokenGoal()


class RowCosts:
    """The time that decode steps take, by their number of rows. Rows beyond the largest known step count as free."""

    SMOOTHING = 0.1
    FORGETTING = 0.002
    """Larger sizes drift towards smaller ones, so that a slow size is tried again after a few hundred steps."""
    LARGEST_JUMP = 2.0
    """A step that takes more times as long was held up by something else."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def add(self, num_rows: int, step_s: float) -> None:
        at = bisect_left(self._sizes, num_rows)
        if at == len(self._sizes) or self._sizes[at] != num_rows:
            expected = self.seconds(num_rows) or step_s
            self._sizes.insert(at, num_rows)
            self._seconds.insert(at, min(step_s, self.LARGEST_JUMP * expected))
        known = self._seconds[at]
        self._seconds[at] += self.SMOOTHING * (min(step_s, self.LARGEST_JUMP * known) - known)
        for larger in range(at + 1, len(self._sizes)):
            self._seconds[larger] += self.FORGETTING * (self._seconds[at] - self._seconds[larger])

    def seconds(self, num_rows: int) -> float:
        """The expected time of a step of so many rows; 0 before the first step."""
        at = bisect_left(self._sizes, num_rows)
        if at < len(self._sizes) and (self._sizes[at] == num_rows or not at):
            return self._seconds[at]
        if at == len(self._sizes):
            return self._seconds[-1] if at else 0.0
        (low, high), (fast, slow) = self._sizes[at - 1 : at + 1], self._seconds[at - 1 : at + 1]
        return fast + (slow - fast) * (num_rows - low) / (high - low)

    def worthwhile(self, num_rows: int, chances: Sequence[float], goal: TokenGoal = NO_GOAL) -> int:
        """How many draft tokens with these chances of acceptance, best first, bring the most tokens a second."""
        plain = self.seconds(num_rows)
        if not plain:
            return 0
        longest_s = goal.limit_s if goal.is_set and plain <= goal.limit_s else SLOWEST * plain
        count, tokens, best = 0, float(num_rows), LEAST_GAIN * num_rows / plain
        for extra, chance in enumerate(chances, 1):
            tokens += chance
            seconds = self.seconds(num_rows + extra)
            if seconds > longest_s:
                break
            if tokens / seconds > best:
                count, best = extra, tokens / seconds
        return count


class Speculation:
    """Drafts tokens for the sequences of one engine, and learns which are accepted."""

    def __init__(self, rules: DecodeRules, goal: TokenGoal, *, max_tokens: int, max_rows: int) -> None:
        """At most `max_tokens` for one sequence, 0 for none; at most `max_rows` in a step, certain ones included.

        Steps with draft tokens keep `goal`.
        """
        self._rules, self._goal, self._max_tokens, self._max_rows = rules, goal, max_tokens, max_rows
        self._rates, self._costs = HitRates(), RowCosts()
        self._knob = Knob(0, "bound" if not max_tokens else "cost")

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """How many tokens the last step drafted, for all of its sequences."""
        return {"draft_tokens": self._knob}

    def extend(
        self, chunks: Sequence[DecodeChunk], room: Callable[[DecodeSequence, int], int]
    ) -> Sequence[DecodeChunk]:
        """The same step, with draft tokens behind the tokens of some sequences.

        `room(sequence, n)` says for how many of n draft tokens there is room.
        """
        if not self._pays(chunks):
            self._knob = Knob(0, "cost" if self._max_tokens else "bound")
            return chunks
        drafts = [self._draft_for(chunk.sequence, room) for chunk in chunks]
        candidates = sorted(
            (-chance, place, index)
            for index, draft in enumerate(drafts)
            for place, chance in enumerate(self._rates.chances(draft))
            if chance >= LEAST_CHANCE
        )
        del candidates[self._max_rows - len(chunks) :]
        taken = [0] * len(chunks)
        best = self._costs.worthwhile(len(chunks), [-chance for chance, _, _ in candidates], self._goal)
        self._knob = Knob(best, "gain" if best else "cost")
        for _, _, index in candidates[:best]:
            taken[index] += 1
        return [
            replace(chunk, draft=draft.first(count)) if count else chunk
            for chunk, draft, count in zip(chunks, drafts, taken, strict=True)
        ]

    def learn(self, chunk: DecodeChunk, sampled: Sequence[int]) -> int:
        """Learn from the `sampled` tokens of all of a chunk's rows; how many of its draft tokens were accepted."""
        draft = chunk.draft
        count = num_accepted(draft, sampled)
        if draft.token_ids:
            seen = chunk.sequence.token_ids[chunk.start + 1 - len(draft.unseen) : chunk.start + 1]
            self._rates.learn(draft, [*seen, *sampled[: count + 1]])
        return count

    def stepped(self, chunks: Sequence[DecodeChunk], step_s: float) -> None:
        """Learn how long a step of these chunks took."""
        if self._max_tokens and len(chunks) <= MAX_SEQUENCES and all(chunk.num_tokens == 1 for chunk in chunks):
            self._costs.add(sum(chunk.num_rows for chunk in chunks), step_s)

    def _pays(self, chunks: Sequence[DecodeChunk]) -> bool:
        """Whether a draft token that is surely accepted would pay. If not, there is no search."""
        if not self._max_tokens or not 0 < len(chunks) <= min(MAX_SEQUENCES, self._max_rows - 1):
            return False
        if not all(chunk.sample and chunk.num_tokens == 1 for chunk in chunks):
            return False
        return self._costs.worthwhile(len(chunks), [1.0], self._goal) > 0

    def _draft_for(self, sequence: DecodeSequence, room: Callable[[DecodeSequence, int], int]) -> Draft:
        num_tokens = self._rules.num_drafts(sequence, self._max_tokens)
        if num_tokens < 1:
            return NOTHING
        constraint = sequence.constraint
        forced = constraint.forced(sequence.output_token_ids)[:num_tokens] if constraint else []
        if forced:
            draft = Draft(tuple(forced), (), (FORCED,) * len(forced))
        else:
            sequence.lookup = sequence.lookup or Lookup()
            draft = sequence.lookup.draft_for(sequence.token_ids, sequence.num_pending, num_tokens)
            draft = draft.first(self._rules.num_possible(sequence, draft.token_ids))
        return draft.first(room(sequence, len(draft.token_ids))) if draft.token_ids else NOTHING
