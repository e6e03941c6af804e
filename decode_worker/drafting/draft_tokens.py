"""Draft tokens for one step of speculative decoding, taken from an earlier place of the text that reads the same. Pure.

Each draft token is one more row of the step. The step runs it behind the tokens before it as if they were certain, and
samples a token behind each row. A draft token that equals the sampled one is accepted: the row behind it ran as it
would have run one step later, so its token counts too. Everything behind the first rejected draft token is dropped. A
row's logits depend only on its sequence, and its draw on logits, seed and position: draft tokens change no answer.

So several tokens a step come where an answer copies (names, code, quotations) or its grammar leaves no choice (the
members of JSON). The search is "prompt lookup" (Saxena 2023). `speculation.py` decides how many tokens to draft, by how
many were accepted recently and by the time that rows take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LONGEST_MATCH = 16
"""Tokens before a place that are compared."""
FORCED = LONGEST_MATCH + 1
"""The kind of a draft token that a grammar forces, beside the lengths of matches."""
MODEL, MODEL_PLACES = FORCED + 1, 8
"""The kind of the first token that a draft model drafts; the next ones are of the kinds behind it, the last for all
further places."""
MODEL_AT_FIRST = 0.8
"""How often a draft model's token is taken to be accepted, if all before it are, while little is known."""
MOST_SEARCHED = 32_768
"""How many tokens back from the end are searched."""
MOST_COMPARED = 1024
"""How many of the places that hold the text's last token are compared, those nearest to the end."""


@dataclass(frozen=True, slots=True)
class Draft:
    """`token_ids` may come next, behind `unseen`, the tokens that steps in flight are expected to sample.

    `kinds` has for each of them, unseen ones first, how many tokens before it agree with the place that it was taken
    from, or FORCED.
    """

    token_ids: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> Draft:
        """The draft cut to its first `count` tokens."""
        return Draft(self.token_ids[:count], self.unseen, self.kinds[: len(self.unseen) + count])

    @property
    def source(self) -> str:
        """Where it comes from, as metrics name it."""
        kind = self.kinds[0] if self.kinds else 0
        return "model" if kind >= MODEL else "grammar" if kind == FORCED else "ngram"


NOTHING = Draft()


def of_model(token_ids: tuple[int, ...]) -> Draft:
    """A draft of tokens that a draft model computed."""
    return Draft(token_ids, (), model_kinds(len(token_ids)))


def model_kinds(count: int) -> tuple[int, ...]:
    """The kinds of a draft model's first `count` tokens."""
    return tuple(MODEL + min(place, MODEL_PLACES - 1) for place in range(count))


@dataclass(slots=True)
class DraftTally:
    """The drafts of one sequence; `accepted[i]` of them had an accepted token in place i."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """A draft of so many tokens was checked."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.accepted += [0] * (num_accepted - len(self.accepted))
        for place in range(num_accepted):
            self.accepted[place] += 1


class Lookup:
    """Finds draft tokens in a growing text."""

    def __init__(self) -> None:
        self._text: npt.NDArray[np.int32] = np.empty(0, np.int32)  # of which the first `_length` are written
        self._length = 0

    def draft_for(self, token_ids: Sequence[int], num_unseen: int, num_tokens: int) -> Draft:
        """Up to `num_tokens` behind the next `num_unseen`. `token_ids` begin with those of the call before."""
        self._take(token_ids)
        end, match = self._best_match()
        if not match:
            return NOTHING
        wanted, period = num_unseen + num_tokens, len(token_ids) - end
        drafted = list(token_ids[end : end + wanted])
        while len(drafted) < wanted:  # the place is so near that the text repeats itself
            drafted.append(drafted[len(drafted) - period])
        kinds = tuple(min(match + place, LONGEST_MATCH) for place in range(wanted))
        return Draft(tuple(drafted[num_unseen:]), tuple(drafted[:num_unseen]), kinds)

    def _take(self, token_ids: Sequence[int]) -> None:
        length = len(token_ids)
        if length > len(self._text):
            self._text = np.resize(self._text, 2 * length)
        self._text[self._length : length] = token_ids[self._length :]
        self._length = length

    def _best_match(self) -> tuple[int, int]:
        """(end, length) of the longest earlier match with the text's end, the last of equal ones; length 0 if none."""
        text = self._text[: self._length]
        first = max(0, self._length - MOST_SEARCHED)
        ends = np.flatnonzero(text[first:-1] == text[-1])[-MOST_COMPARED:] + (first + 1)
        if not len(ends):
            return 0, 0
        match = 1
        while match < LONGEST_MATCH:
            longer = ends[ends > match]
            longer = longer[text[longer - match - 1] == text[-match - 1]]
            if not len(longer):
                break
            ends, match = longer, match + 1
        return int(ends[-1]), match


class HitRates:
    """How often a draft token was accepted, by its kind."""

    SMOOTHING = 0.05
    FORGETTING = 0.002
    """Rates drift back to their start, so that after a few hundred draft tokens a kind is tried again."""
    MODEL_FORGETTING = 0.0005
    """A draft model that is tried again may first have to catch up with a whole text: after a thousand steps or so."""

    def __init__(self) -> None:
        matches = [1.0 - 1.0 / (2.0 + 0.5 * match) for match in range(LONGEST_MATCH + 1)]
        self._at_first = [*matches, 0.95, *(MODEL_AT_FIRST,) * MODEL_PLACES]
        self._rates = list(self._at_first)

    def chances(self, draft: Draft) -> list[float]:
        """For each token of `draft`, the probability that it and all tokens before it are accepted."""
        return self._chances(draft.kinds)[len(draft.unseen) :]

    def of_model(self, count: int) -> list[float]:
        """The same for `count` tokens that a draft model would draft."""
        return self._chances(model_kinds(count))

    def learn(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """`token_ids` are the sampled tokens, from the first of `draft.unseen` on."""
        drafts = zip(draft.kinds, (*draft.unseen, *draft.token_ids), token_ids, strict=False)
        for kind, drafted, real in drafts:
            self._rates[kind] += self.SMOOTHING * ((drafted == real) - self._rates[kind])
            if drafted != real:
                break
        self._forget(0, self.FORGETTING)

    def forget_model(self) -> None:
        """Forget a little after a step in which the draft model did not seem to pay: it is tried again some day."""
        self._forget(MODEL, self.MODEL_FORGETTING)

    def _chances(self, kinds: Sequence[int]) -> list[float]:
        chance, chances = 1.0, []
        for kind in kinds:
            chance *= self._rates[kind]
            chances.append(chance)
        return chances

    def _forget(self, first: int, share: float) -> None:
        for kind in range(first, len(self._rates)):
            self._rates[kind] += share * (self._at_first[kind] - self._rates[kind])


def num_accepted(draft: Draft, sampled: Sequence[int]) -> int:
    """How many tokens of `draft` are accepted. `sampled` has the token of the row before it and of each of its rows."""
    count = 0
    while count < len(draft.token_ids) and draft.token_ids[count] == sampled[count]:
        count += 1
    return count
