"""What a client may send, field by field. Unknown fields are ignored, every optional one may be null.

A field that OpenAI or vLLM know, that would change the answer and that this server does not have, is named in
`UNSUPPORTED` or refused where its value is known: silence would be a wrong answer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

from diptych.common.errors import InvalidRequest
from diptych.common.sampling_params import MAX_GRAMMAR_CHARS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from diptych.router.api.errors import unsupported

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_SALT_CHARS = 256
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: by less, they are no finite numbers any more."""
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_TOOLS = 1024
MAX_STRUCTURED_CHOICES = 4096
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MAX_PARTS = 10_000
"""Of the contents of all messages together, tool calls included."""
INT64 = 2**63

Int = Annotated[int, Field(ge=-INT64, lt=INT64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
NumAlternatives = Annotated[int, Field(ge=0, le=20)]


def _not_too_many(bias: object) -> object:
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:  # before each of a million entries is looked at
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(bias)}")
    return bias


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_too_many)]


class Fields(BaseModel):
    """Base: types are taken as they are (no "1" for 1), what is not known is dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


JsonSchema = dict[str, Any] | bool
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=MAX_STRUCTURED_CHOICES, fail_fast=True)]


class NamedSchema(Fields):
    """A schema as OpenAI wraps it. The answer is held to it, `strict` or not."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description='with type "json_schema"')


class StructuredOutputs(Fields):
    """One of these, which the whole answer must match."""

    json_schema: JsonSchema | GrammarText | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="rules in the form of Lark or GBNF")
    structural_tag: Any = None


class SamplingFields(Fields):
    """What both generation endpoints share: OpenAI's sampling fields and vLLM's extensions of them."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="null: the served model")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="default 1; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="-1 or 0: off")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    logit_bias: LogitBias | None = Field(None, description="token id (as text) -> bias")
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="add prompt_token_ids and token_ids to the answer")
    return_tokens_as_token_ids: bool | None = Field(None, description='log-probabilities name tokens "token_id:ID"')
    prompt_logprobs: NumAlternatives | None = Field(None, description="of the prompt's tokens; not with stream: true")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="requests share cached prefixes only with requests of the same salt"
    )
    user: Annotated[str, Field(max_length=4096)] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: what the answer must match")
    guided_json: JsonSchema | Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    # Known, not here: refused unless null or the value that changes nothing.
    best_of: Int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Int | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        *("truncate_prompt_tokens", "bad_words", "allowed_token_ids", "use_beam_search"),
    )

    def refuse_unsupported(self) -> None:
        """Raises Unsupported for the first field that asks for what this server does not have."""
        for name in self.UNSUPPORTED:
            value = getattr(self, name)
            if value is not None and value is not False and value != [] and value != {}:
                raise unsupported(name, "this field")
        if self.best_of is not None and self.best_of > 1:
            raise unsupported("best_of", f"a value above 1 (got {self.best_of})")
        if self.structured_outputs is not None and self.structured_outputs.structural_tag is not None:
            raise unsupported("structured_outputs.structural_tag", "this field")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: not allowed with stream: true", param="prompt_logprobs")

    @abstractmethod
    def longest_text(self) -> str | list[int]:
        """The longest piece of a prompt that is surely in one: text or token ids."""

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ContentPart(Fields):
    """One part of a message; only text is understood here."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None


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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was sent, nulls left out, for chat templates. Client data inside is not copied, however deep it is."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if isinstance(self.content, list):
            message["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        message |= {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return {key: value for key, value in message.items() if value is not None or key == "content"}


def not_too_many_parts(messages: object) -> object:
    if isinstance(messages, list):  # before each of a million parts is looked at
        found = (message.get(name) for message in messages if isinstance(message, dict) for name in _PARTS)
        num_parts = sum(len(parts) for parts in found if isinstance(parts, list))
        if num_parts > MAX_PARTS:
            raise ValueError(f"must have at most {MAX_PARTS} parts and tool calls together, not {num_parts}")
    return messages


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
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = Field(None, description="false: leave out what the model thinks first")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(None, description='default "auto"')
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call an answer")
    functions: Any = None
    function_call: Any = None
    modalities: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def longest_text(self) -> str | list[int]:
        """Of the last message: templates leave others out."""
        content = self.messages[-1].content
        return content if isinstance(content, str) else ""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        *SamplingFields.UNSUPPORTED,
        *("functions", "audio", "web_search_options", "chat_template", "echo", "add_special_tokens"),
    )

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.function_call not in (None, "none", "auto"):
            raise unsupported("function_call", "a value other than 'none'")
        for i, kind in enumerate(self.modalities or ()):
            if kind != "text":
                raise unsupported(f"modalities[{i}]", f"{kind[:80]!r} (only 'text')")


def _kind_of_prompt(prompt: object) -> str:
    """Decided by the first element, so that one wrong id among a million is one problem and not three million."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"


Ids = Annotated[list[TokenId], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("lists of ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="text, texts, token ids or lists of token ids")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="default 16; 0 only with echo or prompt_logprobs"
    )
    echo: bool | None = None
    logprobs: NumAlternatives | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def longest_text(self) -> str | list[int]:
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return cast(str | list[int], prompt)
        return max(cast(list[str], prompt), key=len)  # or lists of ids: the longest either way

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise unsupported("suffix", "inserting text")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens: 0 is only allowed with echo or prompt_logprobs", param="max_tokens")

    @property
    def echo_logprobs(self) -> int | None:
        """How many alternatives to show beside the log-probability of each token of an echo; None: no such."""
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
