"""Draft tokens for speculative decoding, copied from an earlier match in the text ("prompt lookup", Saxena 2023). Pure.

Each draft token is one more row of the step. The step computes it as if all tokens before it were certain, and samples
a token after each row. A draft token that equals the sampled one is accepted: the row after it was computed as it would
have been one step later, so its token counts too. Tokens after the first rejected draft token are dropped. The logits
of a row depend only on its sequence, and its sample on logits, seed and position, so draft tokens do not change
answers.

A step thus yields several tokens where an answer copies text (names, code, quotations) or its grammar leaves no choice
(members of JSON). `speculation.py` decides how many tokens to draft, from recent acceptance rates and the cost of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LONGEST_MATCH = 16
"""Maximum number of compared tokens before a position."""
FORCED = LONGEST_MATCH + 1
"""Kind of draft tokens that a grammar forces. Lower kinds are lengths of matches."""
MODEL, MODEL_PLACES = FORCED + 1, 8
"""Kind of a draft model's first token. The following tokens have the next kinds, up to a maximum that later ones
share."""
MODEL_AT_FIRST = 0.8
"""Initial acceptance rate of a draft model's token, given that all tokens before it are accepted."""
MAX_SEARCHED = 32_768
"""Maximum number of searched tokens, counted from the end."""
MAX_COMPARED = 1024
"""Maximum number of compared occurrences of the last token, starting with the most recent."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft `token_ids`, which follow `unseen`, the expected tokens of steps in flight.

    `kinds` has an entry for each token, unseen ones first: the number of tokens before it that match, or FORCED.
    """

    token_ids: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> Draft:
        """Return the first `count` tokens of the draft."""
        return Draft(self.token_ids[:count], self.unseen, self.kinds[: len(self.unseen) + count])

    @property
    def source(self) -> str:
        """Source of the draft, as in metrics."""
        kind = self.kinds[0] if self.kinds else 0
        return "model" if kind >= MODEL else "grammar" if kind == FORCED else "ngram"


NOTHING = Draft()


def of_model(token_ids: tuple[int, ...]) -> Draft:
    """Return a draft of tokens computed by a draft model."""
    return Draft(token_ids, (), model_kinds(len(token_ids)))


def model_kinds(count: int) -> tuple[int, ...]:
    """Return the kinds of a draft model's first `count` tokens."""
    return tuple(MODEL + min(place, MODEL_PLACES - 1) for place in range(count))


@dataclass(slots=True)
class DraftStats:
    """Statistics of a sequence's drafts. `accepted[i]` counts drafts whose token i was accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Record a verified draft."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.accepted += [0] * (num_accepted - len(self.accepted))
        for place in range(num_accepted):
            self.accepted[place] += 1


class PromptLookup:
    """Finds draft tokens in a growing text."""

    def __init__(self) -> None:
        self._text: npt.NDArray[np.int32] = np.empty(0, np.int32)  # the first `_length` are valid
        self._length = 0

    def draft_for(self, token_ids: Sequence[int], num_unseen: int, num_tokens: int) -> Draft:
        """Return up to `num_tokens` after the next `num_unseen`. `token_ids` must start with those of the last call."""
        self._take(token_ids)
        end, match = self._best_match()
        if not match:
            return NOTHING
        wanted, period = num_unseen + num_tokens, len(token_ids) - end
        drafted = list(token_ids[end : end + wanted])
        while len(drafted) < wanted:  # the match is so recent that the text repeats
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
        """Return (end, length) of the longest and latest earlier match with the text's end. Length 0 if none."""
        text = self._text[: self._length]
        first = max(0, self._length - MAX_SEARCHED)
        ends = np.flatnonzero(text[first:-1] == text[-1])[-MAX_COMPARED:] + (first + 1)
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


class AcceptanceRates:
    """Acceptance rates of draft tokens by kind."""

    SMOOTHING = 0.05
    FORGETTING = 0.002
    """Rates drift to their initial values, so that a kind is tried again after a few hundred draft tokens."""
    MODEL_FORGETTING = 0.0005
    """Slower drift, because a draft model may first have to catch up with a whole text: about a thousand steps."""

    def __init__(self) -> None:
        matches = [1.0 - 1.0 / (2.0 + 0.5 * match) for match in range(LONGEST_MATCH + 1)]
        self._at_first = [*matches, 0.95, *(MODEL_AT_FIRST,) * MODEL_PLACES]
        self._rates = list(self._at_first)

    def chances(self, draft: Draft) -> list[float]:
        """Return, for each token of `draft`, the probability that it and all tokens before it are accepted."""
        return self._chances(draft.kinds)[len(draft.unseen) :]

    def of_model(self, count: int) -> list[float]:
        """Return the same for `count` tokens of a draft model."""
        return self._chances(model_kinds(count))

    def learn(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """Update the rates. `token_ids` are the sampled tokens, starting with the first of `draft.unseen`."""
        drafts = zip(draft.kinds, (*draft.unseen, *draft.token_ids), token_ids, strict=False)
        for kind, drafted, real in drafts:
            self._rates[kind] += self.SMOOTHING * ((drafted == real) - self._rates[kind])
            if drafted != real:
                break
        self._forget(0, self.FORGETTING)

    def forget_model(self) -> None:
        """Move the draft model's rates towards their initial values after a step without it, to try it again later."""
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
    """Return the number of accepted tokens. `sampled` has the token of the preceding row and of each of its rows."""
    count = 0
    while count < len(draft.token_ids) and draft.token_ids[count] == sampled[count]:
        count += 1
    return count
