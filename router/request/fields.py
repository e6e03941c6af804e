"""Request fields of OpenAI's older APIs. Unknown fields are ignored, and every optional field may be null.

A field that would change the answer in other servers, but is not supported here, is `Refused` unless its value has no
effect: ignoring it would give a wrong answer. `tests/router/request/known` lists these fields.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Discriminator, Field, RootModel, StringConstraints, Tag

from common.errors import InvalidRequest
from common.wire import MAX_GRAMMAR_CHARS, MAX_LOGIT_BIAS, bounds_of
from router.request.extensions import (
    Extensions,
    Fields,
    GrammarText,
    JsonSchema,
    Only,
    Refused,
    StopText,
    TokenId,
    check_beams,
)
from router.text.calls import Function

MAX_STOPS, MAX_CHOICES, MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 64, 128, 1024, 10_000, 1024
"""Limits on the lists of a request. `--max-body-bytes` limits its size, and these the work that it causes."""
MAX_SUFFIX_CHARS = 1024 * 1024
MAX_PARTS = 10_000
"""Maximum number of content parts of all messages, including tool calls."""
MANY_PARTS = 256
"""Conversations with more messages, parts and calls are processed in a thread, because that takes milliseconds."""
MAX_ROLE_CHARS = 64
"""Maximum length of a role. Templates support only a few, short ones."""
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

NumAlternatives = Annotated[int, Field(ge=-1, lt=2**31)]
"""Number of alternatives per token, at most `--max-logprobs`; -1: the whole vocabulary."""
LogprobTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGIT_BIAS, fail_fast=True)]
Temperature = Annotated[float, Field(**bounds_of("temperature"))]
TopP = Annotated[float, Field(**bounds_of("top_p"))]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Fields):
    """A schema in OpenAI's wrapper. The answer must match it, whether or not `strict` is set."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's `response_format`, with the fields of llama.cpp (`schema`) and TGI (`value`) for a schema or pattern."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = Field(None, description='with type "json_schema"')
    bare_schema: JsonSchema | None = Field(default=None, alias="schema", description="a JSON schema")
    value: JsonSchema | GrammarText | None = Field(
        default=None, description='JSON schema; with type "regex", a regular expression'
    )


class SamplingFields(Extensions):
    """Fields of both of OpenAI's older endpoints."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="null: the default model")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Temperature | None = Field(None, description="default 1; 0 is greedy")
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    return_token_ids: bool | None = Field(None, description="return prompt_token_ids and token_ids")
    return_tokens_as_token_ids: bool | None = Field(None, description='name tokens "token_id:ID" in logprobs')
    prompt_logprobs: NumAlternatives | None = Field(None, description="logprobs of prompt tokens; not with stream")
    logprob_token_ids: LogprobTokens | None = Field(
        None, description="return the logprobs of these tokens instead of the likeliest ones"
    )
    use_beam_search: bool | None = Field(None, description="return the n likeliest answers; n or best_of beams")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="for beam search: values above 0 favour longer answers; default 1"
    )
    user: Annotated[str, Field(max_length=4096)] | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are mutually exclusive."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: not allowed with stream: true", param="prompt_logprobs")
        if self.logprob_token_ids is not None and self.num_alternatives is None:
            raise InvalidRequest("logprob_token_ids: only allowed with logprobs", param="logprob_token_ids")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side: only allowed with truncate_prompt_tokens", param="truncation_side")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be -1 or at least 1 (got 0)", param="truncate_prompt_tokens"
            )
        if self.use_beam_search:
            check_beams(self, self.num_alternatives)
        elif self.length_penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty: only allowed with use_beam_search", param="length_penalty")

    @property
    @abstractmethod
    def num_alternatives(self) -> int | None:
        """Number of alternatives per generated token, -1 for the whole vocabulary, or None without logprobs."""

    @property
    def continued_text(self) -> str:
        """Text of the last message if the answer continues it, otherwise ""."""
        return ""

    @property
    def offers_tools(self) -> bool:
        """Whether the model sees tools that it may call."""
        return False

    @abstractmethod
    def without_prompt(self) -> Self:
        """Return a copy without the prompt fields. It is retained while the answer is generated."""

    @property
    def num_sampled(self) -> int:
        """Number of sequences to generate for each prompt."""
        return self.n or 1

    @property
    def num_beams(self) -> int:
        """Number of beams, or 0 without beam search."""
        return (self.n or 1) if self.use_beam_search else 0

    @property
    def end_user(self) -> str:
        """The client's end user, or "" if the body names none."""
        return self.user or ""

    @abstractmethod
    def longest_text(self) -> str | list[int]:
        """Return the longest text, or list of token ids, that is certainly part of a prompt unchanged."""

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ContentPart(Fields):
    """One part of a message: text, or the text of a refusal."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = Field(None, description='with type "refusal"')

    @property
    def said(self) -> str:
        """The text of a part of either type."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class FunctionCall(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Fields):
    role: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ROLE_CHARS)] = Field(
        description="system, developer, user, assistant, tool, or another role that the chat template supports"
    )
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="alias of reasoning_content")
    refusal: str | None = Field(default=None, description="instead of content, or following it")
    function_call: Refused = None
    audio: Refused = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message for chat templates, without nulls. It shares nested objects with the request."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if isinstance(self.content, list):
            message["content"] = [
                {"type": part.type, "text": part.text, "refusal": part.refusal} for part in self.content
            ]
        if self.refusal:
            parts = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else message["content"]
            message["content"] = [*(parts or ()), {"type": "refusal", "refusal": self.refusal}]
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        message |= {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        return {key: value for key, value in message.items() if value is not None or key == "content"}


def not_too_many_parts(messages: object) -> object:
    if isinstance(messages, list):  # before each of possibly a million parts is validated
        num_parts = 0
        for message in messages:
            for name in _PARTS if isinstance(message, dict) else ():
                if isinstance(parts := message.get(name), list):
                    num_parts += len(parts)
        if num_parts > MAX_PARTS:
            raise ValueError(f"must have at most {MAX_PARTS} parts and tool calls in total, not {num_parts}")
    return messages


def has_many_parts(items: Iterable[object]) -> bool:
    """Whether messages or items have more than `MANY_PARTS` nested parts and calls, including themselves."""
    num_parts, left = 0, [iter(items)]
    while left and num_parts <= MANY_PARTS:
        for item in left.pop():
            num_parts += 1
            if num_parts > MANY_PARTS:
                break
            left += [iter(parts) for name in _PARTS if isinstance(parts := getattr(item, name, None), list)]
            if isinstance(source := getattr(item, "source", None), Fields):
                left.append(iter((source,)))
    return num_parts > MANY_PARTS


_PARTS = ("content", "tool_calls", "output")
Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(not_too_many_parts),
]


class FunctionDefinition(Fields):
    name: Annotated[str, StringConstraints(pattern=FUNCTION_NAME)]
    description: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments; null: no arguments")
    strict: bool | None = None

    @cached_property
    def called(self) -> Function:
        """The function for tool-call formats. Shared by all readers of this request."""
        return Function(self.name, self.description, self.parameters)


class Tool(Fields):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """A tool choice: exactly one call of this function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="default: up to the context length"
    )
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    echo: bool | None = Field(None, description="prepend the last message's text if its role is assistant")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = Field(None, description="for chat templates that support it")
    include_reasoning: bool | None = Field(None, description="false: omit the model's reasoning")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(None, description='default "auto"')
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call per answer")

    # Fields of other servers that this server does not support.
    functions: Refused = None
    function_call: Annotated[Any, Only(("none", "auto"))] = None
    modalities: Annotated[list[Annotated[Any, Only(("text",))]], Field(max_length=64, fail_fast=True)] | None = None
    audio: Refused = None
    moderation: Refused = None
    verbosity: Annotated[Any, Only(("medium",))] = None
    web_search_options: Annotated[Any, Only((False,))] = None
    chat_template: Refused = None
    tool_prompt: Refused = None
    add_special_tokens: Refused = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")

    def longest_text(self) -> str | list[int]:
        """Return the last message's text, because templates may omit other messages."""
        content = self.messages[-1].content
        return content if isinstance(content, str) and self.truncate_prompt_tokens is None else ""

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def echo_text(self) -> str:
        """Text of the last message if `echo` is set and the message is the assistant's, otherwise ""."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        if isinstance(last.content, list):
            return "\n".join([part.said for part in last.content])
        return last.content or ""

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @cached_property
    def continued_text(self) -> str:
        last = self.messages[-1]
        if not self.continue_final_message or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "".join([part.said for part in last.content])

    def without_prompt(self) -> Self:
        """Return a copy without messages that has the same `echo_text` and `continued_text`."""
        texts = {"echo_text": self.echo_text, "continued_text": self.continued_text}
        return self.model_copy(update={"messages": [], "chat_template_kwargs": None, **texts})

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template other than the messages. Templates ignore unknown variables."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables |= thinking_switches(self.reasoning_effort != "none")
        return variables | (self.chat_template_kwargs or {})


def thinking_switches(thinks: bool) -> dict[str, Any]:
    """Return the variables with which chat templates of different families enable or disable thinking."""
    return {"enable_thinking": thinks, "thinking": thinks, "thinking_mode": "enabled" if thinks else "disabled"}


def kind_of_prompt(prompt: object) -> str:
    """Return the tag of a prompt's type, judged by its first element: one invalid id then causes a single error."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"


Ids = Annotated[list[TokenId], Field(fail_fast=True)]
PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("lists of ids")],
    Discriminator(kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: PromptField = Field(description="a string, list of strings, list of token ids, or list of such lists")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="default 16; 0 only with echo or prompt_logprobs"
    )
    echo: bool | None = None
    logprobs: NumAlternatives | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="generate this many answers per prompt and return the n likeliest; not with stream"
    )
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = Field(
        None, description="text that follows the answer, for models with fill-in-the-middle support"
    )
    add_special_tokens: bool | None = None

    def longest_text(self) -> str | list[int]:
        prompt = self.prompt if self.truncate_prompt_tokens is None else ""
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return cast(str | list[int], prompt)
        return max(cast(list[str], prompt), key=len)  # or lists of ids: the longest either way

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": "", "suffix": None})

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens: 0 is only allowed with echo or prompt_logprobs", param="max_tokens")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest(f"best_of: must be at least n={self.n or 1} (got {self.best_of})", param="best_of")
        if self.stream and self.num_sampled > (self.n or 1):
            raise InvalidRequest("best_of: must equal n with stream: true", param="best_of")

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def num_sampled(self) -> int:
        return (self.n or 1) if self.use_beam_search else max(self.n or 1, self.best_of or 1)

    @property
    def num_beams(self) -> int:
        return max(self.n or 1, self.best_of or 1) if self.use_beam_search else 0

    @property
    def echo_logprobs(self) -> int | None:
        """Number of alternatives per echoed token, or None without logprobs."""
        return self.logprobs if self.echo else None


class TokenizeRequest(Fields):
    """`POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="tools that the conversation's prompt describes"
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


def _kind_of_invocation(body: Mapping[str, object]) -> str:
    return "chat" if "messages" in body else "completion"


class Invocation(
    RootModel[
        Annotated[
            Annotated[ChatRequest, Tag("chat")] | Annotated[CompletionRequest, Tag("completion")],
            Discriminator(_kind_of_invocation),
        ]
    ]
):
    """`POST /invocations`: a chat request if it has `messages`, otherwise a completion request."""

    known_fields: ClassVar = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
