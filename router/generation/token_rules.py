"""Token-level request parameters: truncation of prompts and bad words."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.wire import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadWord
from router.generation.served_model import ServedModel
from router.request.fields import SamplingFields

MAX_TOKENS_OF_BAD_WORDS = 16_384
"""Limit over all spellings. Each sequence of a request has its own copy, of at most 64 KiB."""


def num_kept(fields: SamplingFields, max_model_len: int, max_tokens: int) -> int:
    """Return the number of prompt tokens that `truncate_prompt_tokens` keeps; 0: all. Raises InvalidRequest.

    A negative `truncate_prompt_tokens` leaves space for an answer of `max_tokens`.
    """
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return 0
    if keep > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: must be at most {max_model_len:,}, the model's maximum length, got {keep:,}",
            param="truncate_prompt_tokens",
        )
    return keep if keep > 0 else max(1, max_model_len - max_tokens)


def truncated(token_ids: list[int], fields: SamplingFields, max_model_len: int, max_tokens: int) -> list[int]:
    """Apply `truncate_prompt_tokens` to a prompt. See `num_kept`. Raises InvalidRequest."""
    keep = num_kept(fields, max_model_len, max_tokens)
    if not keep:
        return token_ids
    return token_ids[:keep] if fields.truncation_side == "right" else token_ids[-keep:]


async def bad_words(model: ServedModel, fields: SamplingFields) -> tuple[BadWord, ...]:
    """Return all token sequences that spell a bad word. Raises InvalidRequest, Unavailable."""
    if not fields.bad_words:
        return ()
    words = await model.text.spellings(fields.bad_words)
    longest = max([word.num_tokens for word in words], default=0)
    if longest > MAX_BAD_WORD_TOKENS or len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words: at most {MAX_BAD_WORDS:,} spellings of up to {MAX_BAD_WORD_TOKENS:,} tokens are allowed, got "
            f"{len(words):,} of up to {longest:,} tokens",
            param="bad_words",
        )
    num_tokens = sum([word.num_tokens for word in words])
    if num_tokens > MAX_TOKENS_OF_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words: at most {MAX_TOKENS_OF_BAD_WORDS:,} tokens are allowed in all spellings together, got "
            f"{num_tokens:,} in {len(words):,} spellings",
            param="bad_words",
        )
    return words
