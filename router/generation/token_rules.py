"""What a request asks of prompts and answers in tokens: truncated prompts, bad words, thoughts of limited length."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.wire import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadWord, ThinkingBudget
from router.generation.served_model import ServedModel
from router.request.fields import SamplingFields
from router.text import CLOSE, OPEN, TAIL_TOKENS, begins_inside, open_thought

MAX_TOKENS_OF_BAD_WORDS = 16_384
"""Of all spellings together. Each of the sequences of a request has its own copy, of 64 KiB at most."""


def num_kept(fields: SamplingFields, max_model_len: int, max_tokens: int) -> int:
    """Return the number of tokens that `truncate_prompt_tokens` keeps of a prompt; 0: all. Raises InvalidRequest.

    The answer may have `max_tokens`.
    """
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return 0
    if keep > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {keep:,} are more than the {max_model_len:,} tokens that the model takes",
            param="truncate_prompt_tokens",
        )
    return keep if keep > 0 else max(1, max_model_len - max_tokens)


def truncated(token_ids: list[int], fields: SamplingFields, max_model_len: int, max_tokens: int) -> list[int]:
    """Apply `truncate_prompt_tokens` to a prompt whose answer may have `max_tokens`. Raises InvalidRequest."""
    keep = num_kept(fields, max_model_len, max_tokens)
    if not keep:
        return token_ids
    return token_ids[:keep] if fields.truncation_side == "right" else token_ids[-keep:]


async def bad_words(model: ServedModel, fields: SamplingFields) -> tuple[BadWord, ...]:
    """Each way in which the tokenizer writes a bad word. Raises InvalidRequest, Unavailable."""
    if not fields.bad_words:
        return ()
    words = await model.text.spellings(fields.bad_words)
    longest = max([word.num_tokens for word in words], default=0)
    if longest > MAX_BAD_WORD_TOKENS or len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words: {len(words):,} spellings of up to {longest:,} tokens, at most {MAX_BAD_WORDS:,} of "
            f"{MAX_BAD_WORD_TOKENS:,} are possible",
            param="bad_words",
        )
    num_tokens = sum([word.num_tokens for word in words])
    if num_tokens > MAX_TOKENS_OF_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words: {len(words):,} spellings of {num_tokens:,} tokens together, at most "
            f"{MAX_TOKENS_OF_BAD_WORDS:,} are taken",
            param="bad_words",
        )
    return words


def thinking_budget(model: ServedModel, fields: SamplingFields, prompt: Sequence[int]) -> ThinkingBudget | None:
    """Return the tokens that end a thought that is too long. Tokens of a thought that the prompt leaves open count.

    Raises InvalidRequest for a model without thought marks.
    """
    budget = fields.thinking_token_budget
    if budget is None or budget < 0:
        return None
    encode, token_bytes = model.text.tokenizer.encode, model.text.token_bytes
    start, end = (encode(mark, add_special_tokens=False) for mark in (OPEN, CLOSE))
    # A mark of several tokens may be written in other tokens than these, unless each is a single byte.
    certain = all(len(ids) == 1 or all(len(token_bytes(i)) == 1 for i in ids) for ids in (start, end))
    if not model.thinks or not certain:
        raise InvalidRequest(
            "thinking_token_budget: this model does not write its thoughts between tokens of their own",
            param="thinking_token_budget",
        )
    tail = model.text.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    if begins_inside(tail):
        return ThinkingBudget(budget, tuple(end))
    if open_thought(fields.continued_text) is not None:
        return ThinkingBudget(max(0, budget - _num_after(start, prompt)), tuple(end))
    return ThinkingBudget(budget + len(start), tuple(end), tuple(start))


def _num_after(mark: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of tokens after the last `mark`, or of all tokens if a truncated prompt does not contain it."""
    tokens, wanted = list(prompt), list(mark)  # an array never equals a list
    ends = range(len(tokens), len(wanted) - 1, -1)
    found = next((end for end in ends if tokens[end - len(wanted) : end] == wanted), 0)
    return len(prompt) - found
