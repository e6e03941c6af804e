"""`POST /v1/chat/completions`: a conversation into a plan, and its answer into OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.errors import InvalidRequest
from diptych.router.access.keys import ApiKey
from diptych.router.api.choice import Choice, Piece
from diptych.router.api.fields import ChatRequest, TokenizeRequest
from diptych.router.api.logprobs import LogprobShapes
from diptych.router.api.parts import AnswerParts, Call
from diptych.router.api.plan import Plan, Prompt, check_num_sequences, fit, make_plan
from diptych.router.api.service import Service
from diptych.router.api.shape import Object
from diptych.router.api.structure import answer_grammar, tool_calling
from diptych.router.text.tools import CallPart, Function


async def plan_chat(
    service: Service, fields: ChatRequest, key: ApiKey, traceparent: str, *, prefix: str = "chatcmpl"
) -> Plan:
    """Renders and tokenises the conversation. Raises RequestError."""
    service.check_model(fields.model)
    fields.refuse_unsupported()
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    check_num_sequences(service, 1, fields.n or 1)
    limit = service.max_model_len
    calling = tool_calling(fields)
    grammar = await answer_grammar(service, fields, calling)
    token_ids = await conversation_tokens(service, fields, calling.functions if calling else (), limit=limit)
    if not token_ids:
        raise InvalidRequest("messages: the conversation makes an empty prompt", param="messages")
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    prompt = Prompt(token_ids, fit(len(token_ids), wanted, limit, param="messages"))
    return make_plan(
        service,
        fields,
        key,
        [prompt],
        prefix=prefix,
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else -1,
        num_prompt_logprobs=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
        traceparent=traceparent,
        grammar=grammar,
    )


async def conversation_tokens(
    service: Service, fields: ChatRequest | TokenizeRequest, functions: Sequence[Function] = (), *, limit: int = 0
) -> list[int]:
    """The messages rendered by the model's template, in tokens; `limit` is that of `TextPipeline.encode`.

    The model is told of `functions` that it may call.
    """
    continued = bool(fields.continue_final_message)
    generation_prompt = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
    try:
        return await service.text.encode_chat(
            [message.as_dict() for message in fields.messages or ()],
            functions=functions,
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            extra=fields.chat_template_kwargs,
            limit=limit,
        )
    except RecursionError as error:
        raise InvalidRequest("messages: nested too deeply", param="messages") from error


class ChatShape:
    """Chat answers and chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, fields: ChatRequest) -> None:
        self._logprobs = (
            LogprobShapes(service.text, fields.top_logprobs or 0, as_ids=bool(fields.return_tokens_as_token_ids))
            if fields.logprobs
            else None
        )
        wanted = fields.prompt_logprobs
        self._prompt_logprobs = LogprobShapes(service.text, wanted) if wanted is not None else None
        self._token_ids = bool(fields.return_token_ids)
        self._parts = AnswerParts(service, fields)

    def opening(self, choice: Choice, prompt_token_ids: list[int] | None) -> Object | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: Choice, piece: Piece) -> Object:
        thought, text, calls = self._parts.taken_apart(choice, piece)
        delta: Object = {"content": text} if text or not (piece.finish_reason or calls or thought) else {}
        if thought:
            delta["reasoning_content"] = thought
        if calls:
            delta["tool_calls"] = [self._call_delta(choice, part) for part in calls]
        chunk: Object = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs.chat(piece.scored) if self._logprobs is not None and piece.scored else None,
            "finish_reason": self._parts.finish_reason(choice, piece.finish_reason) or None,
        }
        if self._token_ids:
            chunk["token_ids"] = piece.token_ids
        return chunk

    def whole(self, choice: Choice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        scored = [token for piece in pieces for token in piece.scored]
        apart = [self._parts.taken_apart(choice, piece) for piece in pieces]
        content = "".join([parts.text for parts in apart])
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if thought := "".join([parts.thought for parts in apart]):
            message["reasoning_content"] = thought
        if calls := self._parts.whole(choice, [call for parts in apart for call in parts.calls]):
            message |= {"content": content or None, "tool_calls": [_tool_call(call) for call in calls]}
        whole: Object = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs.chat(scored) if self._logprobs is not None else None,
            "finish_reason": self._parts.finish_reason(choice, choice.finish_reason),
        }
        if self._token_ids:
            whole["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return whole

    def _call_delta(self, choice: Choice, part: CallPart) -> Object:
        if not part.name:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {
            "index": part.index,
            "id": self._parts.id_of(choice, part.index),
            "type": "function",
            "function": function,
        }

    def envelope(self, first: Choice, prompt_token_ids: list[int] | None) -> Object:
        members: Object = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        if self._prompt_logprobs is not None:
            members["prompt_logprobs"] = self._prompt_logprobs.prompt(
                first.request.prompt_token_ids, first.prompt_logprobs
            )
        return members


def _tool_call(call: Call) -> Object:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
