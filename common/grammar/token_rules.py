"""Finish reasons, and the tokens that a request's parameters forbid or force next. Pure.

Prefill and decode workers apply the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.grammar.vocabulary import MASK_BITS
from common.wire import TOKEN_BYTES, BadWord, SamplingParams, ThinkingBudget, pack_tokens

MAX_CACHED_MASKS = 64
"""Number of cached masks of token lists. Each takes 16 KiB with a vocabulary of 131,072 tokens."""
BANNED = -1e30
"""Logit of banned tokens: below all logits, above tokens that a grammar or `allowed_token_ids` forbid."""
MAX_SPLIT_TOKENS = 8
"""Number of tokens by which a grammar may delay the end marker of a thinking budget: those of a split character."""
TokensToBytes = Callable[[Sequence[int]], bytes]


def finish_reason(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    *,
    num_output_tokens: int,
    token_id: int,
    num_tokens: int,
    max_model_len: int,
) -> str:
    """Return "stop", "length" or "" (not finished) after `token_id` was sampled.

    `num_output_tokens` and `num_tokens` (prompt + output) include `token_id`. An end token counts only after
    `min_tokens` other tokens; `banned_tokens` prevents it from being sampled earlier.
    """
    if num_output_tokens > params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token_id in eos_token_ids:
            return "stop"
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return ""


def banned_tokens(params: SamplingParams, eos_token_ids: Collection[int], num_output_tokens: int) -> tuple[int, ...]:
    """Return the tokens that must not be sampled next: the end tokens, until `min_tokens` are reached."""
    if num_output_tokens >= params.min_tokens:
        return ()
    return tuple(eos_token_ids) + params.stop_token_ids


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of the next token: any but the `banned` ones, or exactly `forced` unless it is None."""

    banned: tuple[int, ...] = ()
    forced: int | None = None


FREE = TokenLimits()


def num_output_needed(params: SamplingParams, num_output_tokens: int) -> int:
    """Return the number of latest output tokens that `token_limits` needs."""
    longest = max([len(beginning) for beginning, _ in params.bad_words], default=0) // TOKEN_BYTES
    return num_output_tokens if _ends_thinking(params, num_output_tokens) else longest


def token_limits(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    num_output_tokens: int,
    output_end: Sequence[int],
    to_bytes: TokensToBytes | None = None,
) -> TokenLimits:
    """Return the limits of the token that follows `num_output_tokens` tokens.

    `output_end` contains at least the last `num_output_needed` of them. `to_bytes` returns the bytes of tokens, in
    which the markers of thinking are found however they are spelled. Without it, only their usual tokens are found.
    """
    banned = banned_tokens(params, eos_token_ids, num_output_tokens)
    budget = params.thinking
    ends_thought = _ends_thinking(params, num_output_tokens)
    if not params.bad_words and not ends_thought:
        return TokenLimits(banned) if banned else FREE
    forced = _next_end_token(budget, output_end, to_bytes) if budget is not None and ends_thought else None
    return TokenLimits(banned + _ends_of_bad_words(params.bad_words, output_end), forced)


def _ends_of_bad_words(bad_words: Sequence[BadWord], output_end: Sequence[int]) -> tuple[int, ...]:
    """Return the last token of each bad word whose other tokens end the output."""
    end = pack_tokens(output_end)
    return tuple([last for beginning, last in bad_words if end.endswith(beginning)])


def _ends_thinking(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether the end marker of the thinking budget may be due."""
    budget = params.thinking
    if budget is None:
        return False
    num_steps = len(budget.end) + (MAX_SPLIT_TOKENS if params.grammar else 0)
    return budget.num_tokens <= num_output_tokens < budget.num_tokens + num_steps


def _next_end_token(budget: ThinkingBudget, output: Sequence[int], to_bytes: TokensToBytes | None) -> int | None:
    """Return the next token of the end marker, or None if the answer has no thinking section or has ended it."""
    end = budget.end
    if not _is_thinking(budget, output, to_bytes):
        return None
    last = tuple(output[max(0, len(output) - len(end) + 1) :])
    written = next(size for size in range(len(last), -1, -1) if last[len(last) - size :] == end[:size])
    return end[written]


def _is_thinking(budget: ThinkingBudget, output: Sequence[int], to_bytes: TokensToBytes | None) -> bool:
    """Whether the output begins with the start marker and does not contain the end marker."""
    if to_bytes is None:
        begins = tuple(output[: len(budget.start)]) == budget.start
        return begins and not _contains(pack_tokens(output), pack_tokens(budget.end))
    start, end = (to_bytes(marker).strip() for marker in (budget.start, budget.end))
    text = to_bytes(output).lstrip()
    return text.startswith(start) and end not in text[len(start) :]


def _contains(output: bytes, mark: bytes) -> bool:
    """Whether packed tokens contain others. Takes milliseconds for a million tokens, because a step waits for it."""
    place = output.find(mark)
    while place >= 0 and place % TOKEN_BYTES:
        place = output.find(mark, place + 1)
    return place >= 0


@lru_cache(maxsize=MAX_CACHED_MASKS)
def token_mask(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Return a mask with a bit for each of these tokens, as int32 [ceil(vocab_size / 32)]. Do not modify it."""
    mask = np.zeros(-(-vocab_size // MASK_BITS), dtype=np.uint32)
    ids = np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], dtype=np.int64)
    np.bitwise_or.at(mask, ids // MASK_BITS, np.uint32(1) << (ids % MASK_BITS).astype(np.uint32))
    return mask.view(np.int32)
