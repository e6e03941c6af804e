"""`POST /v1/chat/completions`: makes a plan of a conversation, and writes the answer in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.api.openai.choice_shape import ChoiceShape, merged
from router.generation import (
    AnswerChoice,
    AnswerParts,
    AnswerPlan,
    Object,
    Origin,
    Piece,
    PlannedPrompt,
    Service,
    answer_grammar,
    bad_words,
    check_num_sequences,
    fit,
    make_plan,
    marks_of,
    num_prompt_logprobs,
    tool_calling,
    truncated,
)
from router.request.fields import ChatRequest, TokenizeRequest, has_many_parts
from router.text import OPEN, CallPart, Part, TextPart, ThoughtPart, open_thought
from router.text.calls import Function


async def plan_chat(service: Service, fields: ChatRequest, origin: Origin, *, prefix: str = "chatcmpl-") -> AnswerPlan:
    """Render and tokenise the conversation. Raises RequestError."""
    service.check_model(fields.model)
    fields.check()
    check_num_sequences(service, 1, max(fields.num_sampled, fields.num_beams))
    limit = service.max_model_len
    calling = tool_calling(fields)
    grammar = await answer_grammar(service, fields, origin.key, calling)
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    functions = calling.functions if calling else ()
    salt = origin.key.salt(fields.cache_salt or "")
    if fields.truncate_prompt_tokens is None:
        token_ids = await conversation_tokens(service, fields, functions, limit=limit, salt=salt)
    else:
        most = service.max_tokenize_bytes
        whole = await conversation_tokens(service, fields, functions, max_bytes=most, salt=salt)
        token_ids = truncated(whole, fields, limit, wanted or 1)
    if not token_ids:
        raise InvalidRequest("messages: the conversation makes an empty prompt", param="messages")
    prompt = PlannedPrompt(token_ids, fit(len(token_ids), wanted, limit, param="messages"))
    return make_plan(
        service,
        fields,
        origin,
        [prompt],
        prefix=prefix,
        num_prompt_logprobs=num_prompt_logprobs(service, fields),
        grammar=grammar,
        bad_words=await bad_words(service, fields),
        marks=marks_of(service, fields, calling),
    )


async def conversation_tokens(
    service: Service,
    fields: ChatRequest | TokenizeRequest,
    functions: Sequence[Function] = (),
    *,
    limit: int = 0,
    max_bytes: int = 0,
    salt: str | None = None,
) -> list[int]:
    """The tokens of the rendered conversation, which describes `functions`; the rest as in `TextPipeline`."""
    continued = bool(fields.continue_final_message)
    generation_prompt = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
    given = fields.messages or []

    def as_dicts() -> list[dict[str, Any]]:
        return [message.as_dict() for message in given]

    try:
        return await service.text.encode_chat(
            await service.text.apart(as_dicts) if has_many_parts(given) else as_dicts(),
            functions=functions,
            dialect=service.dialect,
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            extra=fields.template_variables if isinstance(fields, ChatRequest) else fields.chat_template_kwargs,
            limit=limit,
            max_bytes=max_bytes,
            salt=salt,
        )
    except RecursionError as error:
        raise InvalidRequest("messages: nested too deeply", param="messages") from error


class ChatShape(ChoiceShape):
    """Chat answers and chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, fields: ChatRequest) -> None:
        super().__init__(service, fields)
        self._echo, self._echoed_thought = _split_echo(fields)
        self._parts = AnswerParts(service, fields)
        self.only_text = self._parts.only_text and self._logprobs is None and not self._token_ids

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._parts.num_reasoning_tokens

    def opening(self, choice: AnswerChoice, prompt_token_ids: list[int] | None) -> Object | None:
        delta: Object = {"role": "assistant", "content": self._echo}
        return _chunk(choice, delta | (_thought(self._echoed_thought) if self._echoed_thought else {}))

    def chunks(self, choice: AnswerChoice, piece: Piece, *, at_least_one: bool) -> list[Object]:
        """One for each part, in the order of the text; log-probabilities and token ids are in the first of them."""
        if self.only_text and piece.text and not piece.finish_reason:  # nearly every piece
            return [_chunk(choice, {"content": piece.text})]
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
            chunks[-1]["stop_reason"] = choice.stop_reason
        if self._token_ids:
            for chunk in chunks:
                chunk["token_ids"] = piece.token_ids if chunk is chunks[0] else []
        return chunks

    def whole(self, choice: AnswerChoice, pieces: Sequence[Piece], prompt_token_ids: list[int] | None) -> Object:
        answer = merged(choice, pieces)
        parts = self._parts.whole(choice, pieces)
        content = self._echo + "".join([part.text for part in parts if isinstance(part, TextPart)])
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if thought := self._echoed_thought + "".join([part.text for part in parts if isinstance(part, ThoughtPart)]):
            message |= _thought(thought)
        if calls := [self._call(choice, part) for part in parts if isinstance(part, CallPart)]:
            message |= {"content": content or None, "tool_calls": calls}
        whole: Object = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs.chat(answer.with_logprobs) if self._logprobs is not None else None,
            "finish_reason": self._parts.finish_reason(choice, choice.finish_reason),
        }
        whole |= {"token_ids": answer.token_ids if self._token_ids else None, "stop_reason": choice.stop_reason}
        return whole

    def _delta(self, choice: AnswerChoice, part: Part) -> Object:
        if isinstance(part, ThoughtPart):
            return _thought(part.text)
        if isinstance(part, TextPart):
            return {"content": part.text}
        call = self._call(choice, part) if part.name else {"function": {"arguments": part.arguments}}
        return {"tool_calls": [{"index": part.index, **call}]}

    def _call(self, choice: AnswerChoice, part: CallPart) -> Object:
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": self._parts.id_of(choice, part.index), "type": "function", "function": function}

    def envelope(self, first: AnswerChoice, prompt_token_ids: list[int] | None) -> Object:
        if self._streams:
            return {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        return {"prompt_token_ids": prompt_token_ids, **self._of_prompt(first)}


def _split_echo(fields: ChatRequest) -> tuple[str, str]:
    """Split the echoed text into content and the unfinished thought that the answer continues."""
    echo = fields.echo_text
    thought = open_thought(echo) if fields.continued_text else None
    if thought is None:
        return echo, ""
    return echo[: len(echo) - len(OPEN) - len(thought)], thought.lstrip()


def _thought(text: str) -> Object:
    """A thought under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _chunk(choice: AnswerChoice, delta: Object) -> Object:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
