"""Guesses at what an answer says next, for one step to check: what followed the last time that its text read like this.

A guessed token is one more row of the step: it is run behind the tokens before it as if they were certain, and a token
is sampled behind each. As long as what was sampled is what was guessed, the row behind it ran as it would have run one
step later, so its token counts too; what lies behind the first wrong guess is dropped. A row's logits depend on nothing
but its sequence, and its draw on nothing but logits, seed and position: an answer is the same with guesses as without.

What answers copy (names, code, quotations) and what their grammar leaves no choice about (the members of JSON) comes
several tokens a step that way. The search is "prompt lookup" (Saxena 2023); how much to guess is decided by what was
right of late, and by what rows cost (`drafter.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SUFFIXES = (8, 4, 2, 1)
"""Tokens of the text's end that are looked for in the text before it, the longer ones first."""
LONGEST_MATCH = 16
FORCED = LONGEST_MATCH + 1
LOOKED_THROUGH = 32_768
"""Tokens back from the end that are searched: a tenth of a millisecond at worst."""
TOKEN = np.dtype("<i4")
WIDTH = TOKEN.itemsize


@dataclass(frozen=True, slots=True)
class Draft:
    """`token_ids` may come next, behind `unseen` if those are the tokens that steps in flight are sampling.

    `kinds` says of each of them, unseen ones first, how many tokens before it agree with the place that it was taken
    from, or that a grammar has FORCED it.
    """

    token_ids: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return Draft(self.token_ids[:count], self.unseen, self.kinds[: len(self.unseen) + count])


NOTHING = Draft()


class Lookup:
    """A text that grows, and what is likely to come behind it."""

    def __init__(self) -> None:
        self._text = bytearray()

    def guess(self, token_ids: Sequence[int], num_unseen: int, num_tokens: int) -> Draft:
        """Up to `num_tokens` behind the next `num_unseen`. `token_ids` begin with those of the call before."""
        text = self._text
        text += np.array(token_ids[len(text) // WIDTH :], TOKEN).tobytes()
        for length in SUFFIXES:
            end = _end_of_last(text, length)
            if end:
                break
        else:
            return NOTHING
        wanted, known = num_unseen + num_tokens, len(token_ids)
        guessed = list(token_ids[end : end + wanted])
        while len(guessed) < wanted:  # the place is so near that the text repeats itself
            guessed.append(guessed[len(guessed) - (known - end)])
        match = _agreement(token_ids, end, length)
        kinds = tuple(min(match + place, LONGEST_MATCH) for place in range(wanted))
        return Draft(tuple(guessed[num_unseen:]), tuple(guessed[:num_unseen]), kinds)


def _end_of_last(text: bytearray, length: int) -> int:
    """Where, in tokens, the last earlier appearance of the text's last `length` tokens ends; 0 without one."""
    if len(text) <= length * WIDTH:
        return 0
    suffix = bytes(text[-length * WIDTH :])
    first = max(0, len(text) - LOOKED_THROUGH * WIDTH)
    at = text.rfind(suffix, first, len(text) - WIDTH)
    while at >= 0 and at % WIDTH:  # bytes of neighbouring tokens that look like it
        at = text.rfind(suffix, first, at + len(suffix) - 1)
    return at // WIDTH + length if at >= 0 else 0


def _agreement(token_ids: Sequence[int], end: int, length: int) -> int:
    """How many tokens before `end` are those before the text's end; `length` of them are known to be."""
    last = len(token_ids)
    while length < min(LONGEST_MATCH, end) and token_ids[end - length - 1] == token_ids[last - length - 1]:
        length += 1
    return length


class HitRates:
    """How often a guess was right, by its kind."""

    SMOOTHING = 0.05
    FORGETTING = 0.002
    """What was not tried for a few hundred guesses is worth another try."""

    def __init__(self) -> None:
        self._at_first = [1.0 - 1.0 / (2.0 + 0.5 * match) for match in range(LONGEST_MATCH + 1)] + [0.95]
        self._rates = list(self._at_first)

    def chances(self, draft: Draft) -> list[float]:
        """Of each token of `draft` the probability that it, and all before it, are right."""
        chance, chances = 1.0, []
        for kind in draft.kinds:
            chance *= self._rates[kind]
            chances.append(chance)
        return chances[len(draft.unseen) :]

    def learn(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """`token_ids` are what really came, from the first of `draft.unseen` on."""
        guesses = zip(draft.kinds, (*draft.unseen, *draft.token_ids), token_ids, strict=False)
        for kind, guessed, real in guesses:
            self._rates[kind] += self.SMOOTHING * ((guessed == real) - self._rates[kind])
            if guessed != real:
                break
        for kind, at_first in enumerate(self._at_first):
            self._rates[kind] += self.FORGETTING * (at_first - self._rates[kind])


def num_right(draft: Draft, sampled: Sequence[int]) -> int:
    """How many tokens of `draft` came true; `sampled` are the row before it and the row behind each of its tokens."""
    count = 0
    while count < len(draft.token_ids) and draft.token_ids[count] == sampled[count]:
        count += 1
    return count
