"""Answer plans of conversations: chat requests, and requests of other APIs that are translated to chat requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError

from common.errors import InvalidRequest
from router.generation.context import RequestContext
from router.generation.parts import marks_of
from router.generation.plan import (
    AnswerPlan,
    PlannedPrompt,
    check_num_sequences,
    fit,
    make_plan,
    num_prompt_logprobs,
)
from router.generation.served_model import ServedModel
from router.generation.structure import answer_grammar, tool_calling
from router.generation.token_rules import bad_words, truncated
from router.request import named_as
from router.request.errors import invalid_translation
from router.request.fields import ChatRequest, TokenizeRequest, has_many_parts
from router.text.calls import Function


async def plan_chat(
    model: ServedModel, fields: ChatRequest, context: RequestContext, *, prefix: str = "chatcmpl-"
) -> AnswerPlan:
    """Render and tokenise the conversation and plan its answer. Raises RequestError."""
    fields.check()
    check_num_sequences(model, 1, max(fields.num_sampled, fields.num_beams))
    limit = model.max_model_len
    calling = tool_calling(fields)
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    functions = calling.functions if calling else ()
    if fields.truncate_prompt_tokens is None:
        token_ids = await conversation_tokens(model, fields, functions, limit=limit, salt=context.salt)
    else:
        most = model.max_tokenize_bytes
        whole = await conversation_tokens(model, fields, functions, max_bytes=most, salt=context.salt)
        token_ids = truncated(whole, fields, limit, wanted or 1)
    if not token_ids:
        raise InvalidRequest("messages: the conversation renders to an empty prompt", param="messages")
    grammar = await answer_grammar(model, fields, context, calling, token_ids)
    prompt = PlannedPrompt(token_ids, fit(len(token_ids), wanted, limit, param="messages"))
    return make_plan(
        model,
        fields,
        context,
        [prompt],
        prefix=prefix,
        num_prompt_logprobs=num_prompt_logprobs(model, fields),
        grammar=grammar,
        bad_words=await bad_words(model, fields),
        marks=marks_of(model, fields, calling),
    )


async def conversation_tokens(
    model: ServedModel,
    fields: ChatRequest | TokenizeRequest,
    functions: Sequence[Function] = (),
    *,
    limit: int = 0,
    max_bytes: int = 0,
    salt: str | None = None,
) -> list[int]:
    """Return the tokens of the rendered conversation, with descriptions of `functions`. See `TextPipeline`."""
    continued = bool(fields.continue_final_message)
    generation_prompt = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
    given = fields.messages or []

    def as_dicts() -> list[dict[str, Any]]:
        return [message.as_dict() for message in given]

    try:
        return await model.text.encode_chat(
            await model.text.apart(as_dicts) if has_many_parts(given) else as_dicts(),
            functions=functions,
            dialect=model.dialect,
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            extra=fields.template_variables if isinstance(fields, ChatRequest) else fields.chat_template_kwargs,
            limit=limit,
            max_bytes=max_bytes,
            salt=salt,
        )
    except RecursionError as error:
        raise InvalidRequest("messages: nested too deeply", param="messages") from error


class OtherFields(Protocol):
    """Fields of another API: the names of their equivalents in a chat request, and the prefix of answer ids."""

    names: ClassVar[Mapping[str, str]]
    id_prefix: ClassVar[str]


async def chat_of(model: ServedModel, make: Callable[[], ChatRequest], *, is_long: bool) -> ChatRequest:
    """Call `make` to translate a conversation, in a thread if it `is_long`. Raises RequestError.

    A valid request of the other API can exceed the limits of a chat request, for example on tool calls per message.
    """
    try:
        return await model.text.apart(make) if is_long else make()
    except ValidationError as error:
        raise invalid_translation(error) from error


async def plan_translated(
    model: ServedModel, fields: OtherFields, context: RequestContext, make: Callable[[], ChatRequest], *, is_long: bool
) -> AnswerPlan:
    """Translate, render and tokenise the conversation. RequestErrors use the other API's field names."""
    chat = await chat_of(model, make, is_long=is_long)
    with named_as(fields.names):
        return await plan_chat(model, chat, context, prefix=fields.id_prefix)
