"""`POST /v1/chat/completions`: makes a plan of a conversation, and writes the answer in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from router.api.choice_shape import ChoiceShape, merged
from router.generation.choice import AnswerChoice, Piece
from router.generation.origin import Origin
from router.generation.parts import AnswerParts
from router.generation.plan import AnswerPlan, PlannedPrompt, check_num_sequences, fit, make_plan
from router.generation.service import Service
from router.generation.shape import Object
from router.generation.structure import answer_grammar, tool_calling
from router.request.fields import ChatRequest, TokenizeRequest
from router.text.answer_part import CallPart, Part, TextPart, ThoughtPart
from router.text.tools import Function


async def plan_chat(service: Service, fields: ChatRequest, origin: Origin, *, prefix: str = "chatcmpl") -> AnswerPlan:
    """Render and tokenise the conversation. Raises RequestError."""
    service.check_model(fields.model)
    fields.check()
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
    prompt = PlannedPrompt(token_ids, fit(len(token_ids), wanted, limit, param="messages"))
    return make_plan(
        service,
        fields,
        origin,
        [prompt],
        prefix=prefix,
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else -1,
        num_prompt_logprobs=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
        grammar=grammar,
    )


async def conversation_tokens(
    service: Service,
    fields: ChatRequest | TokenizeRequest,
    functions: Sequence[Function] = (),
    *,
    limit: int = 0,
    max_bytes: int = 0,
) -> list[int]:
    """The tokens of the rendered conversation, which describes `functions`; limits as in `TextPipeline.encode`."""
    continued = bool(fields.continue_final_message)
    generation_prompt = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
    try:
        return await service.text.encode_chat(
            [message.as_dict() for message in fields.messages or ()],
            functions=functions,
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            extra=fields.template_variables if isinstance(fields, ChatRequest) else fields.chat_template_kwargs,
            limit=limit,
            max_bytes=max_bytes,
        )
    except RecursionError as error:
        raise InvalidRequest("messages: nested too deeply", param="messages") from error


class ChatShape(ChoiceShape):
    """Chat answers and chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, fields: ChatRequest) -> None:
        super().__init__(service, fields, (fields.top_logprobs or 0) if fields.logprobs else None)
        self._parts = AnswerParts(service, fields)

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        return _chunk(choice, {"role": "assistant", "content": ""})

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """One for each part, in the order of the text; log-probabilities and token ids are in the first of them."""
        deltas = [self._delta(choice, part) for part in self._parts.taken_apart(choice, piece)]
        with_logprobs = piece.with_logprobs if self._logprobs is not None else []
        if not deltas:
            if not (with_logprobs or piece.finish_reason or self._token_ids or at_least_one):
                return []
            deltas = [{} if piece.finish_reason else {"content": ""}]
        chunks = [_chunk(choice, delta) for delta in deltas]
        if self._logprobs is not None and with_logprobs:
            chunks[0]["logprobs"] = self._logprobs.chat(with_logprobs)
        if piece.finish_reason:
            chunks[-1]["finish_reason"] = self._parts.finish_reason(choice, piece.finish_reason)
        if self._token_ids:
            for chunk in chunks:
                chunk["token_ids"] = piece.token_ids if chunk is chunks[0] else []
        return chunks

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        answer = merged(choice, pieces)
        parts = self._parts.whole(choice, pieces)
        content = "".join([part.text for part in parts if isinstance(part, TextPart)])
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if thought := "".join([part.text for part in parts if isinstance(part, ThoughtPart)]):
            message["reasoning_content"] = thought
        if calls := [self._call(choice, part) for part in parts if isinstance(part, CallPart)]:
            message |= {"content": content or None, "tool_calls": calls}
        whole: Object = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs.chat(answer.with_logprobs) if self._logprobs is not None else None,
            "finish_reason": self._parts.finish_reason(choice, choice.finish_reason),
        }
        if self._token_ids:
            whole["token_ids"] = answer.token_ids
        return whole

    def _delta(self, choice: AnswerChoice, part: Part) -> Object:
        if isinstance(part, ThoughtPart):
            return {"reasoning_content": part.text}
        if isinstance(part, TextPart):
            return {"content": part.text}
        call = self._call(choice, part) if part.name else {"function": {"arguments": part.arguments}}
        return {"tool_calls": [{"index": part.index, **call}]}

    def _call(self, choice: AnswerChoice, part: CallPart) -> Object:
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": self._parts.id_of(choice, part.index), "type": "function", "function": function}

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        members: Object = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        return members | self._of_prompt(first)


def _chunk(choice: AnswerChoice, delta: Object) -> Object:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
