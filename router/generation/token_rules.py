"""Token-level request parameters: truncation of prompts, bad words, thinking budgets."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.wire import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadWord, ThinkingBudget
from router.generation.served_model import ServedModel
from router.request.fields import SamplingFields
from router.text import CLOSE, OPEN, TAIL_TOKENS, begins_inside, open_thought

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


def thinking_budget(model: ServedModel, fields: SamplingFields, prompt: Sequence[int]) -> ThinkingBudget | None:
    """Return the request's thinking budget. Tokens of a thought that the prompt leaves open count.

    Raises InvalidRequest if the model has no unambiguous thought marks.
    """
    budget = fields.thinking_token_budget
    if budget is None or budget < 0:
        return None
    encode, token_bytes = model.text.tokenizer.encode, model.text.token_bytes
    start, end = (encode(mark, add_special_tokens=False) for mark in (OPEN, CLOSE))
    # Other tokens may spell a mark of several tokens, unless each of its tokens is a single byte.
    certain = all(len(ids) == 1 or all(len(token_bytes(i)) == 1 for i in ids) for ids in (start, end))
    if not model.thinks or not certain:
        raise InvalidRequest(
            "thinking_token_budget: not supported by this model, which has no special tokens around its thoughts",
            param="thinking_token_budget",
        )
    tail = model.text.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    if begins_inside(tail):
        return ThinkingBudget(budget, tuple(end))
    if open_thought(fields.continued_text) is not None:
        return ThinkingBudget(max(0, budget - _num_after(start, prompt)), tuple(end))
    return ThinkingBudget(budget + len(start), tuple(end), tuple(start))


def _num_after(mark: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of tokens after the last `mark`, or of all tokens if the prompt does not contain it."""
    tokens, wanted = list(prompt), list(mark)  # an array never equals a list
    ends = range(len(tokens), len(wanted) - 1, -1)
    found = next((end for end in ends if tokens[end - len(wanted) : end] == wanted), 0)
    return len(prompt) - found
