"""Thoughts of an answer: where the prompt leaves them, what may precede a required form, and budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from common.errors import InvalidRequest
from common.wire import MAX_THINKING_MARK, ThinkingBudget
from router.generation.served_model import ServedModel
from router.request.fields import ChatRequest, SamplingFields
from router.text import Prelude, ThoughtMarks, ThoughtPosition, thought_prelude

MAX_BLANK_TOKENS = 8
"""Tokens of white space that templates may write after a mark."""


def position_of(model: ServedModel, marks: ThoughtMarks, prompt: Sequence[int], continued: str) -> ThoughtPosition:
    """Determine where the prompt ends in relation to the thought, given the text of the message to continue, or ""."""
    longest = len(marks.start.encode()) + len(marks.end.encode())  # a token has at least one byte
    prompt_end = model.text.tokenizer.decode(prompt[-longest - MAX_BLANK_TOKENS :], skip_special_tokens=False)
    return ThoughtPosition.of(marks, prompt_end, continued)


def prelude_of(model: ServedModel, fields: ChatRequest, prompt: Sequence[int], *, takes_breaks: bool) -> Prelude | None:
    """Return the text that may precede a required form of the answer; None if the form begins with the first token.

    With `takes_breaks`, line breaks may separate a thought from the form.
    """
    if model.config.reasoning_in_form or not model.shows_thoughts:
        return None
    if model.dialect.format.has_channels:
        rules = "" if fields.continued_text else model.dialect.format.prelude(model.text.spell)
        return Prelude(rules) if rules else None
    marks = model.thoughts_of(with_tools=fields.offers_tools)
    if marks is None:
        return None
    position = position_of(model, marks, prompt, fields.continued_text)
    return thought_prelude(marks, position, model.text.spell_all, takes_breaks=takes_breaks)


def thinking_budget(
    model: ServedModel, fields: SamplingFields, prompt: Sequence[int], *, in_form: bool
) -> ThinkingBudget | None:
    """Return the request's thinking budget. Tokens of a thought that the prompt leaves open count.

    `in_form`: the first token begins a required form, in which an end mark would be out of place. Raises InvalidRequest
    if the model has no thought marks.
    """
    budget = fields.thinking_token_budget
    if budget is None or budget < 0:
        return None
    channels = model.dialect.format.thought_marks if model.shows_thoughts else None
    marks = channels or model.thoughts_of(with_tools=fields.offers_tools)
    if marks is None:
        what = "not supported by this model, whose thoughts have no known marks"
        raise InvalidRequest(f"thinking_token_budget: {what}", param="thinking_token_budget")
    start, end = (model.text.tokenizer.encode(mark, add_special_tokens=False) for mark in (marks.start, marks.end))
    if max(len(start), len(end)) > MAX_THINKING_MARK:
        what = f"not supported by this model, whose marks of thoughts have more than {MAX_THINKING_MARK} tokens"
        raise InvalidRequest(f"thinking_token_budget: {what}", param="thinking_token_budget")
    if in_form:
        return None
    match position_of(model, marks, prompt, fields.continued_text):
        case ThoughtPosition.OPENED:
            return ThinkingBudget(budget, tuple(end))
        case ThoughtPosition.WITHIN:
            return ThinkingBudget(budget - _num_after(model, marks.start, prompt, budget), tuple(end))
        case _:
            return ThinkingBudget(budget + len(start), tuple(end), tuple(start))


def _num_after(model: ServedModel, mark: str, prompt: Sequence[int], most: int) -> int:
    """Return the number of tokens after the last `mark`, up to `most`. Without a mark, returns that of all tokens."""
    wanted = mark.encode()
    texts = [*map(model.text.token_bytes, prompt[-(most + len(wanted)) :])]
    _, found, after = b"".join(texts).rpartition(wanted)
    number = bisect_right([*accumulate(map(len, reversed(texts)))], len(after)) if found else len(texts)
    return min(most, number)
