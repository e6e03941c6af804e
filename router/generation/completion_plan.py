"""Answer plans of text prompts."""

from __future__ import annotations

from common.errors import InvalidRequest
from router.generation.context import RequestContext
from router.generation.plan import (
    AnswerPlan,
    PlannedPrompt,
    check_num_sequences,
    fit,
    make_plan,
    num_prompt_logprobs,
)
from router.generation.served_model import ServedModel
from router.generation.structure import answer_grammar
from router.generation.token_rules import bad_words, num_kept, truncated
from router.request.fields import CompletionRequest
from router.text import middle_form

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's completions API."""


async def plan_completion(
    model: ServedModel,
    fields: CompletionRequest,
    context: RequestContext,
    *,
    prefix: str = "cmpl-",
    default: int | None = DEFAULT_MAX_TOKENS,
) -> AnswerPlan:
    """Tokenise the prompts and plan the answer. Raises RequestError.

    `default` is the maximum number of output tokens without `max_tokens`, None for all that fit.
    """
    fields.check()
    sources = _sources(fields.prompt)
    check_num_sequences(model, len(sources), max(fields.num_sampled, fields.num_beams))
    grammar = await answer_grammar(model, fields, context)
    prompts = [await _prompt(model, fields, source, param, default) for source, param in sources]
    return make_plan(
        model,
        fields,
        context,
        prompts,
        prefix=prefix,
        num_prompt_logprobs=num_prompt_logprobs(model, fields, fields.echo_logprobs),
        echo=bool(fields.echo),
        grammar=grammar,
        bad_words=await bad_words(model, fields),
    )


def _sources(prompt: str | list[int] | list[str] | list[list[int]]) -> list[tuple[str | list[int], str]]:
    """Return each prompt with the name of its field."""
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [([part for part in prompt if isinstance(part, int)], "prompt")]
    return [(part, f"prompt[{i}]") for i, part in enumerate(prompt) if isinstance(part, str | list)]


async def _prompt(
    model: ServedModel, fields: CompletionRequest, source: str | list[int], param: str, default: int | None
) -> PlannedPrompt:
    limit, text = model.max_model_len, model.text
    echo = ""
    if isinstance(source, str):
        token_ids = await _encoded(model, fields, source)
        echo = source if fields.echo else ""
    else:
        token_ids = source
    if fields.suffix:
        token_ids = await _around_middle(model, fields, token_ids)
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    token_ids = truncated(token_ids, fields, limit, max(1, wanted)) or _begin_of_text(model, param)
    max_tokens = fit(len(token_ids), fields.max_tokens, limit, default=default, param=param)
    if not isinstance(source, str):
        text.check_ids(token_ids, param=param)  # after `fit`, which bounds their number
        if fields.echo:
            echo = await text.decode(token_ids, skip_special_tokens=fields.skip_special_tokens is not False)
    return PlannedPrompt(token_ids, max_tokens, echo)


async def _encoded(model: ServedModel, fields: CompletionRequest, source: str) -> list[int]:
    """Return the tokens of a text prompt. A prompt that will be truncated may exceed the model's length."""
    special = fields.add_special_tokens is not False
    if fields.truncate_prompt_tokens is None:
        return await model.text.encode(source, add_special_tokens=special, limit=model.max_model_len)
    wanted = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    keep = 0 if fields.suffix else num_kept(fields, model.max_model_len, max(1, wanted))
    most, side = model.max_tokenize_bytes, fields.truncation_side or "left"
    return await model.text.encode(source, add_special_tokens=special, max_bytes=most, keep=keep, side=side)


async def _around_middle(model: ServedModel, fields: CompletionRequest, before: list[int]) -> list[int]:
    """Build a fill-in-the-middle prompt. Raises InvalidRequest if the model does not support it."""
    form = middle_form(model.text.tokenizer)
    if form is None:
        raise InvalidRequest("suffix: this model has no fill-in-the-middle tokens", param="suffix")
    if fields.echo_logprobs is not None:
        raise InvalidRequest("suffix: cannot be combined with echo and logprobs", param="suffix")
    limit = model.max_model_len
    after = await model.text.encode(fields.suffix or "", add_special_tokens=False, limit=limit)
    opening = await model.text.encode("", add_special_tokens=True)  # such as a beginning-of-sequence token
    begins = before[: len(opening)] == opening
    return [*opening, *form.prompt(before[len(opening) :], after)] if begins else form.prompt(before, after)


def _begin_of_text(model: ServedModel, param: str) -> list[int]:
    """Return the replacement of an empty prompt. Raises InvalidRequest if the model has no such token."""
    bos = model.text.tokenizer.token_to_id(model.files.bos_token) if model.files.bos_token else None
    if bos is None:
        raise InvalidRequest(f"{param}: must not be empty", param=param)
    return [bos]
