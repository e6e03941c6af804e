"""The fields that a client may send. Unknown fields are ignored, and every optional one may be null.

A field of other servers that would change the answer, and that this server does not have, is `Refused` unless its value
changes nothing: to ignore it would give a wrong answer. tests/router/api/known lists these fields.
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
"""Entries of one request's lists: `--max-body-bytes` bounds its size, these the work that its bytes ask for."""
MAX_SUFFIX_CHARS = 1024 * 1024
MAX_PARTS = 10_000
"""Parts of the contents of all messages together, tool calls included."""
MANY_PARTS = 256
"""A conversation of more messages, parts and calls is prepared in a thread, because that takes milliseconds."""
MAX_ROLE_CHARS = 64
"""Templates know a handful of roles, all of them short."""
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

NumAlternatives = Annotated[int, Field(ge=-1, lt=2**31)]
"""At most --max-logprobs; -1: the whole vocabulary."""
LogprobTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGIT_BIAS, fail_fast=True)]
Temperature = Annotated[float, Field(**bounds_of("temperature"))]
TopP = Annotated[float, Field(**bounds_of("top_p"))]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Fields):
    """A schema as OpenAI wraps it. The answer must match it, `strict` or not."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's `response_format`, with llama.cpp's (`schema`) and TGI's (`value`) fields for a schema or pattern."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = Field(None, description='with type "json_schema"')
    bare_schema: JsonSchema | None = Field(default=None, alias="schema", description="a JSON schema")
    value: JsonSchema | GrammarText | None = Field(
        default=None, description='JSON schema; with type "regex", a regular expression'
    )


class SamplingFields(Extensions):
    """The fields of both of OpenAI's older endpoints."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="null: the default model")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Temperature | None = Field(None, description="default 1; 0 is greedy")
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    return_token_ids: bool | None = Field(None, description="add prompt_token_ids and token_ids to the answer")
    return_tokens_as_token_ids: bool | None = Field(None, description='log-probabilities name tokens "token_id:ID"')
    prompt_logprobs: NumAlternatives | None = Field(None, description="of the prompt's tokens; not with stream: true")
    logprob_token_ids: LogprobTokens | None = Field(
        None, description="show the log-probabilities of these tokens in place of the best ones"
    )
    use_beam_search: bool | None = Field(None, description="find the n likeliest answers, by n beams or best_of")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="of a beam search: above 0 longer answers win; default 1"
    )
    user: Annotated[str, Field(max_length=4096)] | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Raises InvalidRequest for fields that exclude each other."""
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
        """Alternatives to each generated token, -1 for the whole vocabulary; None without log-probabilities."""

    @property
    def continued_text(self) -> str:
        """The text of the last message if the answer continues it, else ""."""
        return ""

    @abstractmethod
    def without_prompt(self) -> Self:
        """Return a copy without the fields that only make the prompt, which is kept while the answer is made."""

    @property
    def num_sampled(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.n or 1

    @property
    def num_beams(self) -> int:
        """Beams of a beam search; 0 without one."""
        return (self.n or 1) if self.use_beam_search else 0

    @property
    def end_user(self) -> str:
        """The client's own user, if the body names one."""
        return self.user or ""

    @abstractmethod
    def longest_text(self) -> str | list[int]:
        """The longest text, or list of token ids, that is surely in a prompt as it is."""

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ContentPart(Fields):
    """One part of a message: text, which may be that of a refusal."""

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
        description="system, developer, user, assistant, tool, or another that the chat template shows"
    )
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")
    refusal: str | None = Field(default=None, description="in place of content, or behind it")
    function_call: Refused = None
    audio: Refused = None

    def as_dict(self) -> dict[str, Any]:
        """The message for chat templates, without nulls. It shares the client's own data inside, however deep."""
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
    if isinstance(messages, list):  # before a million parts are checked one by one
        num_parts = 0
        for message in messages:
            for name in _PARTS if isinstance(message, dict) else ():
                if isinstance(parts := message.get(name), list):
                    num_parts += len(parts)
        if num_parts > MAX_PARTS:
            raise ValueError(f"must have at most {MAX_PARTS} parts and tool calls together, not {num_parts}")
    return messages


def has_many_parts(items: Iterable[object]) -> bool:
    """Whether messages or items have more than `MANY_PARTS` parts and calls with them, at any depth."""
    num_parts, left = 0, [iter(items)]
    while left and num_parts <= MANY_PARTS:
        for item in left.pop():
            num_parts += 1
            if num_parts > MANY_PARTS:
                break
            left += [iter(parts) for name in _PARTS if isinstance(parts := getattr(item, name, None), list)]
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
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments; null: it has none")
    strict: bool | None = None

    @cached_property
    def called(self) -> Function:
        """The function for tool-call formats. One object for all readers of this request."""
        return Function(self.name, self.description, self.parameters)


class Tool(Fields):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """A tool choice: this one, once."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="default: as many as fit"
    )
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    echo: bool | None = Field(None, description="begin with the last message's text, if it is the assistant's")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = Field(None, description="for chat templates that know of it")
    include_reasoning: bool | None = Field(None, description="false: leave out what the model thinks first")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(None, description='default "auto"')
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call an answer")

    # Other servers have these, this one has not.
    functions: Refused = None
    function_call: Annotated[Any, Only(("none", "auto"))] = None
    modalities: Annotated[list[Annotated[Any, Only(("text",))]], Field(max_length=64, fail_fast=True)] | None = None
    audio: Refused = None
    moderation: Refused = None
    verbosity: Annotated[Any, Only(("medium",))] = None
    web_search_options: Annotated[Any, Only((False,))] = None
    chat_template: Refused = None
    add_special_tokens: Refused = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")

    def longest_text(self) -> str | list[int]:
        """The last message's text: templates may leave out other messages."""
        content = self.messages[-1].content
        return content if isinstance(content, str) and self.truncate_prompt_tokens is None else ""

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def echo_text(self) -> str:
        """The text that precedes the answer: of the last message, if the answer goes on with the same role."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        if isinstance(last.content, list):
            return "\n".join([part.said for part in last.content])
        return last.content or ""

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
        """Variables of the chat template beside the messages. A template ignores those that it does not use."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        return variables | (self.chat_template_kwargs or {})


def kind_of_prompt(prompt: object) -> str:
    """By the first element alone, so that one wrong id among a million is one problem and not three million."""
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

    prompt: PromptField = Field(description="text, texts, token ids or lists of token ids")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="default 16; 0 only with echo or prompt_logprobs"
    )
    echo: bool | None = None
    logprobs: NumAlternatives | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="generate so many answers to each prompt, and give the n likeliest; not with stream: true"
    )
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = Field(
        None, description="text behind the answer, for models that fill in the middle"
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
            raise InvalidRequest(f"best_of: must be at least n ({self.n or 1}) (got {self.best_of})", param="best_of")
        if self.stream and self.num_sampled > (self.n or 1):
            raise InvalidRequest("best_of: more than n is not allowed with stream: true", param="best_of")

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
        """Alternatives to show with the log-probability of each token of an echo; None without log-probabilities."""
        return self.logprobs if self.echo else None


class TokenizeRequest(Fields):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="that a conversation's prompt tells of"
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
    """`POST /invocations`: a conversation if it has `messages`, and else a text to continue."""

    known_fields: ClassVar = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
