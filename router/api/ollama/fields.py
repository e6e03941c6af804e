"""Request fields of Ollama's API and their translation to requests of OpenAI's API."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from common.errors import InvalidRequest
from common.model_files import builtin_name
from common.wire import MAX_GRAMMAR_CHARS, bounds_of
from router.api.embeddings import EmbeddingRequest
from router.request import Fields, Int64, Only, Refused, StopText, function_tool
from router.request import fields as ours
from router.request.errors import unsupported
from router.request.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_SUFFIX_CHARS,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    Effort,
    Temperature,
    TopP,
    thinking_switches,
)

TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 40
"""Ollama's default sampling."""
LATEST = ":latest"
"""Tag of a model without another one."""
NAMES: Mapping[str, str] = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "stop": "options.stop",
    "response_format": "format",
    "messages[0]": "prompt",
}
"""Fields of a chat or completion request, mapped to their names in this API."""


def served_name(name: str) -> str:
    """Return the name at this router of a model that Ollama calls `name`."""
    return builtin_name(name.removesuffix(LATEST))


def tagged_name(name: str) -> str:
    """Return the name in lists of models. Clients add the tag to names without one, and look them up there."""
    return name if ":" in name else f"{name}{LATEST}"


ModelName = Annotated[str, Field(max_length=1024), AfterValidator(served_name)]
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"[+-]?(?:{PART.pattern})+")
MAX_DURATION_CHARS = 64


def seconds_of(duration: object) -> float | None:
    """Return a duration in seconds: a number of them, or a text such as "1h30m". A negative one is infinite.

    Raises ValueError.
    """
    if duration is None:
        return None
    text = str(duration).strip()
    if isinstance(duration, int | float | str) and len(text) <= MAX_DURATION_CHARS:
        if DURATION.fullmatch(text):
            seconds = sum(float(number) * SECONDS[unit] for number, unit in PART.findall(text))
            return math.inf if text.startswith("-") and seconds else seconds
        with suppress(ValueError):
            if not math.isnan(seconds := float(text)):
                return math.inf if seconds < 0 else seconds
    raise ValueError('must be a number of seconds, or a duration such as "5m" or "1h30m"')


KeepAlive = Annotated[
    float | None,
    BeforeValidator(seconds_of),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]
MaxTokens = Annotated[int, Field(ge=-2, lt=2**31)]
Penalty = Annotated[float, Field(**bounds_of("presence_penalty"))]
Stops = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]


class Options(Fields):
    """Sampling. Other options of Ollama, which are about loading a model or its speed, have no effect."""

    num_predict: MaxTokens | None = Field(None, description="Maximum number of tokens; default and -1: all that fit.")
    temperature: Temperature | None = Field(None, description=f"Default: {TEMPERATURE}.")
    top_p: TopP | None = Field(None, description=f"Default: {TOP_P}.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description=f"Default: {TOP_K}; 0: disabled.")
    min_p: Annotated[float, Field(**bounds_of("min_p"))] | None = None
    seed: Int64 | None = Field(None, description="Default and -1: random.")
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Field(**bounds_of("repetition_penalty"))] | None = Field(
        None, description="Applies to all tokens of the context, whatever `repeat_last_n` is."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Annotated[Any, Only((0,))] = None
    typical_p: Annotated[Any, Only((1, 1.0))] = None
    tfs_z: Annotated[Any, Only((1, 1.0))] = None

    def members(self) -> dict[str, Any]:
        """Return the sampling fields of OpenAI's API."""
        found = {name: getattr(self, name) for name in ("min_p", "presence_penalty", "frequency_penalty")}
        return found | {
            "max_tokens": self.num_predict if self.num_predict is not None and self.num_predict > 0 else None,
            "temperature": TEMPERATURE if self.temperature is None else self.temperature,
            "top_p": TOP_P if self.top_p is None else self.top_p,
            "top_k": TOP_K if self.top_k is None else self.top_k,
            "seed": self.seed if self.seed != -1 else None,
            "stop": self.stop or None,
            "repetition_penalty": self.repeat_penalty,
        }


class ModelFields(Fields):
    """Fields of every request to a model, with those that model selection reads."""

    names: ClassVar[Mapping[str, str]] = NAMES
    id_prefix: ClassVar = "ollama-"

    model: ModelName | None = Field(None, description="Default: the default model.")
    keep_alive: KeepAlive = Field(
        None,
        description="Time after the answer for which a model that was loaded on demand stays loaded: seconds, or a "
        'duration such as "5m". 0: unload it at once. -1: keep it until another model needs its memory.',
    )
    request_class: None = None
    cache_salt: None = None

    @property
    def tier(self) -> None:
        """This API has no service tiers."""
        return None

    @property
    def end_user(self) -> str:
        """This API names no end users."""
        return ""


class GenerationFields(ModelFields):
    """Fields of `/api/chat` and `/api/generate`."""

    stream: bool | None = Field(None, description="Default: true.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description='"json" for an object, or the JSON schema of the answer.'
    )
    think: bool | Effort | None = Field(None, description="Whether, or with which effort, the model thinks.")
    options: Options | None = None
    logprobs: Refused = None
    top_logprobs: Refused = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model."""
        return self.keep_alive == 0

    def _members(self) -> dict[str, Any]:
        members = {"model": self.model, "stream": self.streams, "response_format": self._response_format()}
        return members | (self.options or Options.model_validate({})).members()

    def _response_format(self) -> ours.ResponseFormat | None:
        if not self.format:
            return None
        if self.format == "json":
            return ours.ResponseFormat(type="json_object", json_schema=None)
        return ours.ResponseFormat(type="json_schema", json_schema=ours.NamedSchema(schema=self.format))

    def _thinking(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        thinks = self.think not in (False, "none")
        effort = self.think if isinstance(self.think, str) and thinks else None
        switches = {"chat_template_kwargs": thinking_switches(thinks), "include_reasoning": thinks}
        return switches | {"reasoning_effort": effort}


class CalledFunction(Fields):
    name: str
    arguments: dict[str, Any] | None = None


class Call(Fields):
    id: str | None = None
    function: CalledFunction


class OllamaMessage(Fields):
    role: Annotated[str, Field(min_length=1, max_length=ours.MAX_ROLE_CHARS)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Refused = None


class OllamaFunction(Fields):
    name: Annotated[str, Field(pattern=ours.FUNCTION_NAME)]
    description: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Fields):
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaChatRequest(GenerationFields):
    """Body of `POST /api/chat`. Without messages, the request loads the model."""

    names: ClassVar[Mapping[str, str]] = {name: other for name, other in NAMES.items() if other != "prompt"}

    messages: (
        Annotated[
            list[OllamaMessage],
            Field(max_length=MAX_MESSAGES, fail_fast=True),
            BeforeValidator(ours.not_too_many_parts),
        ]
        | None
    ) = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @property
    def is_long(self) -> bool:
        """Whether translating the request takes milliseconds."""
        return ours.has_many_parts([*(self.messages or ()), *(self.tools or ())])

    @property
    def has_prompt(self) -> bool:
        return bool(self.messages)

    def longest_text(self) -> str | list[int]:
        """Return the text of the last message, because templates may omit others."""
        return (self.messages[-1].content if self.messages else None) or ""

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ValidationError."""
        messages = list(_messages(self.messages or ()))
        functions = [tool.function for tool in self.tools or ()]
        tools = [function_tool(one.name, one.description, one.parameters) for one in functions]
        last = messages[-1]
        continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
        members = self._members() | self._thinking() | {"messages": messages, "tools": tools or None}
        return ChatRequest(**members, continue_final_message=continues or None)


def _messages(given: list[OllamaMessage] | tuple[()]) -> Iterator[ours.Message]:
    """Yield chat messages. Results without an id belong to the preceding calls, in their order."""
    waiting: deque[str] = deque()
    for i, message in enumerate(given):
        calls = []
        for j, call in enumerate(message.tool_calls or ()):
            waiting.append(call.id or f"call_{i}_{j}")
            arguments = orjson.dumps(call.function.arguments or {}).decode()
            function = ours.FunctionCall(name=call.function.name, arguments=arguments)
            calls.append(ours.ToolCall(id=waiting[-1], function=function))
        is_result = message.role == "tool"
        next_id = waiting.popleft() if is_result and waiting else None
        yield ours.Message(
            role=message.role,
            content=message.content or "",
            name=message.tool_name if is_result else None,
            tool_call_id=message.tool_call_id or next_id,
            tool_calls=calls or None,
            reasoning_content=message.thinking,
        )


class OllamaGenerateRequest(GenerationFields):
    """Body of `POST /api/generate`. Without a prompt, the request loads the model."""

    prompt: str | None = None
    system: str | None = None
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = Field(
        None, description="Text that follows the answer, for models with fill-in-the-middle support."
    )
    raw: bool | None = Field(None, description="Whether the prompt is used without the chat template.")
    template: Refused = None
    context: Refused = None
    images: Refused = None

    is_long: ClassVar = False

    @property
    def has_prompt(self) -> bool:
        return bool(self.prompt)

    def longest_text(self) -> str | list[int]:
        return self.prompt or ""

    def as_chat(self) -> ChatRequest:
        """Return the chat request with the prompt as the user's message. Raises ValidationError."""
        system = [ours.Message(role="system", content=self.system)] if self.system else []
        messages = [*system, ours.Message(role="user", content=self.prompt)]
        return ChatRequest(**self._members(), **self._thinking(), messages=messages)

    def as_completion(self) -> CompletionRequest:
        """Return the completion request with the raw prompt. Raises InvalidRequest, ValidationError."""
        if self.system:
            raise unsupported("system", "a system prompt without a chat template")
        return CompletionRequest(**self._members(), prompt=self.prompt or "", suffix=self.suffix or None)


class OllamaEmbedRequest(ModelFields):
    """Body of `POST /api/embed`."""

    input: str | Annotated[list[str], Field(max_length=2048, fail_fast=True)]
    truncate: bool | None = Field(None, description="false: refuse inputs that exceed the context length.")
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @cached_property
    def as_embedding(self) -> EmbeddingRequest:
        """The equivalent request of OpenAI's API. Raises InvalidRequest."""
        if not self.input:
            raise InvalidRequest("input: must not be empty", param="input")
        cut = None if self.truncate is False else -1
        given = {"model": self.model, "input": self.input, "dimensions": self.dimensions}
        return EmbeddingRequest.model_validate(given | {"truncate_prompt_tokens": cut})

    def longest_text(self) -> str | list[int]:
        return self.as_embedding.longest_text() if self.input else ""


class OllamaEmbeddingsRequest(ModelFields):
    """Body of `POST /api/embeddings`, the former path of `/api/embed`."""

    prompt: str

    @cached_property
    def as_embedding(self) -> EmbeddingRequest:
        """The equivalent request of OpenAI's API."""
        given = {"model": self.model, "input": self.prompt, "truncate_prompt_tokens": -1}
        return EmbeddingRequest.model_validate(given)

    def longest_text(self) -> str | list[int]:
        return ""


class OllamaModelRequest(Fields):
    """Body of `POST /api/show` and `DELETE /api/delete`."""

    model: ModelName | None = None
    name: ModelName | None = Field(None, description="Former name of `model`.")

    @property
    def wanted(self) -> str:
        """The name of the model. Raises InvalidRequest."""
        if not (found := self.model or self.name):
            raise InvalidRequest("model: is required", param="model")
        return found


class OllamaPullRequest(OllamaModelRequest):
    """Body of `POST /api/pull`."""

    stream: bool | None = Field(None, description="Default: true.")
    insecure: Refused = None
