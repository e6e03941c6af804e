"""Request fields of OpenAI's Responses API and their translation to a chat request."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from common.errors import InvalidRequest
from common.wire import MAX_GRAMMAR_CHARS
from router.request import (
    EXTENSIONS,
    Extensions,
    Fields,
    JsonSchema,
    Only,
    Refused,
    StopText,
    as_content,
    at_most,
    function_tool,
    named_tool,
    text_content,
)
from router.request import fields as ours
from router.request.errors import unsupported
from router.request.fields import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, Effort, Temperature, TopP

TEXT_PARTS = frozenset(("input_text", "output_text", "text"))
MAX_ID_CHARS = 256
MAX_METADATA = 256
"""Maximum number of metadata entries of a response."""
WITH_LOGPROBS = "message.output_text.logprobs"
SAME = ("model", "temperature", "top_p", "top_logprobs", "stream", "parallel_tool_calls", "user", "stop")
"""Fields with the same meaning in a chat request, in addition to the extensions."""
HOSTED_TOOL = re.compile(
    r"(web_search|web_search_preview|file_search|code_interpreter|image_generation|mcp|tool_search)(_\d{4}_\d\d_\d\d)?"
)
"""Types of tools that OpenAI's servers run. Agents declare them in every request, so they are ignored."""
NAMES: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tool_choice.function": "tool_choice",
}
"""Fields of a chat request, mapped to their names in this API."""


class Part(Fields):
    """One part of a message. Only text is supported."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None


Content = str | Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Item(Fields):
    """A message, a function call, or the output of a call. Its type determines its members."""

    type: Annotated[str, Field(max_length=64)] | None = Field(None, description='Default: "message".')
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        None, description='Only with type "message".'
    )
    content: Content | None = None
    call_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Id of a call, also in its output.")
    name: Annotated[str, Field(max_length=64)] | None = None
    arguments: str | None = Field(None, description="Arguments of a call as JSON text.")
    output: Content | None = Field(None, description='Only with type "function_call_output".')
    id: Any = Field(None, description="Stored with the item if it is a plain string.")
    summary: Any = Field(None, description='Only with type "reasoning". Stored with the item.')
    namespace: Annotated[str, Field(max_length=64)] | None = Field(None, description="Namespace of the function.")
    is_async: Refused = Field(None, alias="async")
    caller: Annotated[Any, Only(({"type": "direct"},))] = None


class ResponseTool(Fields):
    type: Annotated[str, Field(max_length=64)] = Field(description='"function" or "namespace".')
    name: Annotated[str, Field(pattern=ours.FUNCTION_NAME)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description='Functions of a tool of type "namespace".', exclude_if=lambda tools: tools is None
    )
    description: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    is_async: Refused = Field(None, alias="async", exclude=True)
    defer_loading: Annotated[Refused, Field(exclude=True)] = None
    allowed_callers: Annotated[Any, Only(([], ["direct"])), Field(exclude=True)] = None


class ChosenTool(Fields):
    type: Literal["function"]
    name: Annotated[str, Field(max_length=64)]


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Only(("medium",))] = None


class Reasoning(Fields):
    """Reasoning options. The response contains the model's reasoning but no summary of it."""

    effort: Effort | None = Field(None, description="Passed to chat templates that support it.")
    summary: Annotated[Any, Only(("auto",))] = None
    generate_summary: Annotated[Any, Only(("auto",))] = None
    context: Annotated[Any, Only(("auto", "current_turn"))] = None
    mode: Annotated[Any, Only(("standard",))] = None


class ResponsesRequest(Extensions):
    """Body of `POST /v1/responses`. `previous_response_id` is the stored response whose conversation continues."""

    names: ClassVar = NAMES
    id_prefix: ClassVar = "resp_"

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Default: the default model.")
    input: Annotated[
        str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)],
        BeforeValidator(ours.not_too_many_parts),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Temperature | None = Field(None, description="Default: 1. Greedy sampling: 0.")
    top_p: TopP | None = None
    top_logprobs: ours.NumAlternatives | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = Field(None, description="Whether to store the response for later requests. Default: true.")
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    background: bool | None = Field(
        None, description="Return immediately and generate the response in the background. Poll for it by its id."
    )
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], at_most(MAX_METADATA)] | None = None
    user: Annotated[str, Field(max_length=4096)] | None = None
    reasoning: Reasoning | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Fields of OpenAI's API that this server does not support.
    conversation: Refused = None
    prompt: Refused = None
    context_management: Refused = None
    moderation: Refused = None
    truncation: Annotated[Any, Only(("disabled",))] = None

    # Fields of this server's other APIs.
    n: Annotated[Any, Only((1,))] = None
    max_tokens: Refused = None
    messages: Refused = None
    response_format: Refused = None
    reasoning_effort: Refused = None

    @property
    def end_user(self) -> str:
        """The client's user id, if the body has one."""
        return self.user or ""

    def longest_text(self) -> str | list[int]:
        """Return the text of the last item, because templates may omit others."""
        if isinstance(self.input, str):
            return self.input
        content = self.input[-1].content
        return content if isinstance(content, str) else ""

    def without_prompt(self) -> Self:
        """Return a copy without the prompt, to be kept while the answer is generated."""
        return self.model_copy(update={"input": "", "chat_template_kwargs": None})

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [Item.model_validate({"role": "user", "content": self.input})]
        return self.input

    @property
    def num_items(self) -> int:
        return 1 if isinstance(self.input, str) else len(self.input)

    def is_long(self, past: Sequence[Item]) -> bool:
        """Whether translating the request and the items before it takes milliseconds."""
        given = () if isinstance(self.input, str) else self.input
        return ours.has_many_parts([*past, *given, *(self.tools or ())])

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or WITH_LOGPROBS in (self.include or ())

    @cached_property
    def ignored_tools(self) -> tuple[str, ...]:
        """Types of declared tools that this server ignores, because OpenAI's servers run them."""
        return tuple(dict.fromkeys(tool.type for tool in self.tools or () if HOSTED_TOOL.fullmatch(tool.type)))

    @cached_property
    def functions(self) -> FunctionNames:
        """The functions that the answer may call. Raises InvalidRequest for an unsupported tool."""
        return FunctionNames(self.tools or ())

    def as_chat(self, past: Sequence[Item] = ()) -> ChatRequest:
        """Return the equivalent chat request, including the conversation so far. Raises InvalidRequest."""
        members: dict[str, Any] = {name: getattr(self, name) for name in (*SAME, *EXTENSIONS)}
        members |= {
            "messages": list(self._messages(past)),
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.wants_logprobs or None,
            "response_format": _response_format(self.text),
            "tools": self.functions.tools or None,
            "tool_choice": _tool_choice(self.tool_choice),
        }
        return ChatRequest(**members)

    def _messages(self, past: Sequence[Item]) -> Iterator[ours.Message]:
        if self.instructions:
            yield ours.Message(role="system", content=self.instructions)
        said: ours.Message | None = None  # the assistant's text; calls that follow it belong to the same message
        calls: list[ours.ToolCall] = []
        thoughts: list[str] = []
        pending: list[str] = []  # thoughts that belong to the next text or call
        for i, item in enumerate((*past, *self.items), start=-len(past)):
            where = f"input[{i}]"
            if item.type == "reasoning":
                pending += filter(None, [_thought(item.content)])
                continue
            if item.type == "function_call":
                calls.append(_call(item, where, self.functions))
                thoughts, pending = thoughts + pending, []
                continue
            message = _message(item, where)
            if said is not None or calls:
                yield _answer(said, calls, thoughts)
                said, calls, thoughts = None, [], []
            if message.role == "assistant":
                said, thoughts = message, pending
            else:
                yield message
            pending = []
        if said is not None or calls:
            yield _answer(said, calls, thoughts)


class FunctionNames:
    """Mapping between a request's functions and the names that the model sees.

    The model sees a function's own name, or `namespace__name` if another function has the same name.
    """

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        found = list(_functions(tools))
        counts = Counter(tool.name for _, tool, _ in found)
        self.tools: list[ours.Tool] = []
        self._seen: dict[tuple[str | None, str | None], str] = {}
        self._places: dict[str, tuple[str | None, str]] = {}
        for namespace, tool, where in found:
            assert tool.name is not None
            is_shared = namespace is not None and counts[tool.name] > 1
            name = f"{namespace}__{tool.name}" if is_shared else tool.name
            if not re.fullmatch(ours.FUNCTION_NAME, name):
                what = f"{where}.name: {name!r} has {len(name)} characters with its namespace; the maximum is 64"
                raise InvalidRequest(what, param="tools")
            self._seen[namespace, tool.name] = name
            self._places[name] = (namespace, tool.name)
            self.tools.append(function_tool(name, tool.description, tool.parameters))

    def seen(self, namespace: str | None, name: str) -> str:
        """Return the name that the model sees. Undeclared functions keep their names."""
        return self._seen.get((namespace or None, name), name)

    def place(self, seen: str) -> tuple[str | None, str]:
        """Return the namespace (or None) and the name of a function that the model calls."""
        return self._places.get(seen, (None, seen))


def _functions(tools: Sequence[ResponseTool]) -> Iterator[tuple[str | None, ResponseTool, str]]:
    """Yield each function with its namespace and its path in the request. Skips tools that OpenAI's servers run."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if HOSTED_TOOL.fullmatch(tool.type):
            continue
        if tool.type == "namespace":
            if tool.name is None:
                raise InvalidRequest(f"{where}.name: is required", param="tools")
            for j, inner in enumerate(tool.tools or ()):
                yield tool.name, _function(inner, f"{where}.tools[{j}]"), f"{where}.tools[{j}]"
        else:
            yield None, _function(tool, where), where


def _function(tool: ResponseTool, where: str) -> ResponseTool:
    if tool.type != "function":
        raise unsupported(f"{where}.type", f"{tool.type!r}")
    if tool.name is None:
        raise InvalidRequest(f"{where}.name: is required", param="tools")
    return tool


def _answer(said: ours.Message | None, calls: Sequence[ours.ToolCall], thoughts: Sequence[str]) -> ours.Message:
    content = said.content if said is not None else None
    return ours.Message(
        role="assistant",
        content=(content or None) if calls else content,
        tool_calls=list(calls) or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _thought(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join([part.text or "" for part in content or ()])


def _message(item: Item, where: str) -> ours.Message:
    """Convert a message or the output of a call to a chat message. Raises InvalidRequest."""
    match item.type:
        case None | "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{where}: a message must have a role and content", param="input")
            return ours.Message(role=item.role, content=_content(item.content, f"{where}.content"))
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"{where}: the output of a call must have a call_id and an output", param="input")
            output = _content(item.output, f"{where}.output")
            return ours.Message(role="tool", content=output, tool_call_id=item.call_id)
    raise unsupported(f"{where}.type", f"{item.type!r}")


def _content(content: Content, where: str) -> str | list[ours.ContentPart]:
    return content if isinstance(content, str) else as_content(text_content(content, TEXT_PARTS, where))


def _call(item: Item, where: str, functions: FunctionNames) -> ours.ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest(f"{where}: a call must have a call_id and a name", param="input")
    name = functions.seen(item.namespace, item.name)
    function = ours.FunctionCall(name=name, arguments=item.arguments or "{}")
    return ours.ToolCall(id=item.call_id, function=function)


def _tool_choice(choice: str | ChosenTool | None) -> str | ours.NamedTool | None:
    return named_tool(choice.name) if isinstance(choice, ChosenTool) else choice


def _response_format(text: TextOptions | None) -> ours.ResponseFormat | None:
    wanted = text.format if text is not None else None
    if wanted is None:
        return None
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise InvalidRequest("text.format.schema: is required with type 'json_schema'", param="text")
    schema = ours.NamedSchema(name=wanted.name, schema=wanted.json_schema)
    return ours.ResponseFormat(type=wanted.type, json_schema=schema)
