"""Which tokens may come next by a request's own rules: bad words, allowed tokens, the end of a thought. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.grammar.vocabulary import MASK_BITS
from common.sampling.finish import banned_tokens
from common.wire.sampling_params import SamplingParams, ThinkingBudget

KEPT_MASKS = 64
"""Bit masks of token lists that requests repeat, of a bit a token: 16 KiB each for a vocabulary of 131,072."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What must not be sampled at one place of an answer.

    `banned` tokens must not, and of `forced`, unless it is None, nothing else may.
    """

    banned: tuple[int, ...] = ()
    forced: int | None = None


FREE = TokenLimits()


def num_output_needed(params: SamplingParams) -> int:
    """How many of an answer's last tokens `token_limits` needs."""
    longest = max([len(word) for word in params.bad_words], default=1)
    mark = params.thinking.num_tokens + len(params.thinking.end) if params.thinking is not None else 0
    return max(longest - 1, mark)


def token_limits(
    params: SamplingParams, eos_token_ids: Collection[int], num_output_tokens: int, output_end: Sequence[int]
) -> TokenLimits:
    """The limits of the token behind `num_output_tokens` tokens, of which `output_end` are the last.

    They are all of them, or at least `num_output_needed(params)`.
    """
    banned = banned_tokens(params, eos_token_ids, num_output_tokens)
    budget = params.thinking
    ends_thought = budget is not None and _is_due(budget, num_output_tokens)
    if not params.bad_words and not ends_thought:
        return TokenLimits(banned) if banned else FREE
    forced = _next_of_end(budget, output_end) if budget is not None and ends_thought else None
    return TokenLimits(banned + _ends_of_bad_words(params.bad_words, output_end), forced)


def _ends_of_bad_words(bad_words: Sequence[Sequence[int]], output_end: Sequence[int]) -> tuple[int, ...]:
    """The last token of each bad word whose other tokens end the output."""
    found = []
    for word in bad_words:
        beginning = len(word) - 1
        if not beginning or tuple(output_end[-beginning:]) == tuple(word[:-1]):
            found.append(word[-1])
    return tuple(found)


def _is_due(budget: ThinkingBudget, num_output_tokens: int) -> bool:
    """Whether the mark of the thought's end is being written: it takes as many tokens as it has, from the budget on."""
    return budget.num_tokens <= num_output_tokens < budget.num_tokens + len(budget.end)


def _next_of_end(budget: ThinkingBudget, output: Sequence[int]) -> int | None:
    """The next token of the mark that ends the thought; None for an answer without a thought, or behind it."""
    output, end = tuple(output), budget.end
    if output[: len(budget.start)] != budget.start:
        return None
    if any(output[place : place + len(end)] == end for place in range(len(output) - len(end) + 1)):
        return None
    longest = min(len(end) - 1, len(output))
    written = next(size for size in range(longest, -1, -1) if output[len(output) - size :] == end[:size])
    return end[written]


@lru_cache(maxsize=KEPT_MASKS)
def token_mask(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """A bit for each of these tokens, 32 in each int32 [ceil(vocab_size / 32)]. Must not be changed."""
    mask = np.zeros(-(-vocab_size // MASK_BITS), dtype=np.uint32)
    ids = np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], dtype=np.int64)
    np.bitwise_or.at(mask, ids // MASK_BITS, np.uint32(1) << (ids % MASK_BITS).astype(np.uint32))
    return mask.view(np.int32)
