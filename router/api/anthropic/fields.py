"""Request fields of Anthropic's Messages API and their translation to a chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field

from common.errors import InvalidRequest
from common.wire import MAX_GRAMMAR_CHARS
from router.api.anthropic.blocks import Block, Content, content_of, parts_of, references
from router.request import (
    EXTENSIONS,
    Extensions,
    Fields,
    Only,
    Refused,
    StopText,
    as_content,
    function_tool,
    named_tool,
)
from router.request import fields as ours
from router.request.errors import ThreadUnsupported, unsupported
from router.request.fields import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, Effort, TopP, thinking_switches

THOUGHTS = frozenset(("thinking", "redacted_thinking"))
CLEARS_THINKING = "clear_thinking_20251015"
NAMES: Mapping[str, str] = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
}
"""Fields of a chat request, mapped to their names in this API."""


class Turn(Fields):
    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Annotated[Any, Only(("never",))] = None
    output_config: Refused = None


class MessageTool(Fields):
    type: Annotated[str, Field(max_length=64)] | None = Field(None, description='Null or "custom".')
    name: Annotated[str, Field(pattern=ours.FUNCTION_NAME)] | None = None
    description: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: Refused = None
    defer_loading: bool | None = Field(
        None, description="The prompt has the tool only if a `tool_reference` block in `messages` names it."
    )
    allowed_callers: Annotated[Any, Only(([], ["direct"]))] = None


class MessageToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=64)] | None = Field(None, description='Only with type "tool".')
    disable_parallel_tool_use: bool | None = None


class Metadata(Fields):
    user_id: Annotated[str, Field(max_length=4096)] | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="With `omitted`, the model thinks but its thinking is not returned."
    )


class OutputFormat(Fields):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = Field(None, description="The format that the answer must have.")
    effort: Effort | None = Field(None, description="Passed to chat templates that support it.")
    task_budget: Refused = None


class Edit(Fields):
    type: Annotated[Any, Only((CLEARS_THINKING,))]


class ContextManagement(Fields):
    edits: Annotated[list[Edit], Field(max_length=64, fail_fast=True)] | None = None


class Conversation(Fields):
    """Fields of `/v1/messages` and `/v1/messages/count_tokens` that define the prompt."""

    names: ClassVar = NAMES

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Default: the default model.")
    messages: Annotated[
        list[Turn],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(ours.not_too_many_parts),
    ]
    system: Content | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Former name of `output_config.format`.")
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    thread: Any = None

    # Fields of Anthropic's API that this server does not support.
    compaction: Refused = None
    container: Refused = None
    mcp_servers: Refused = None

    @property
    def is_long(self) -> bool:
        """Whether translating the request takes milliseconds."""
        system = self.system if isinstance(self.system, list) else ()
        return ours.has_many_parts([*self.messages, *system, *(self.tools or ())])

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises InvalidRequest."""
        if self.thread is not None:
            what = "not supported, because this server does not store conversations; send all messages"
            raise ThreadUnsupported(f"thread: {what}", param="thread")
        return ChatRequest(**self._members())

    def longest_text(self) -> str | list[int]:
        """Return the text of the last message, because templates may omit others."""
        content = self.messages[-1].content
        return content if isinstance(content, str) else ""

    def _members(self) -> dict[str, Any]:
        messages = list(_system(self.system))
        for i, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{i}].content")
        if not messages:
            raise InvalidRequest("messages: must contain text", param="messages")
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        shown = self.thinking is not None and self.thinking.display != "omitted"
        members: dict[str, Any] = {"model": self.model, "messages": messages, "include_reasoning": thinks and shown}
        variables = thinking_switches(thinks)
        members["chat_template_kwargs"] = variables | (self.chat_template_kwargs or {})
        members["reasoning_effort"] = self.output_config.effort if self.output_config is not None else None
        members["response_format"] = self._response_format()
        if self.messages[-1].role == "assistant" and messages[-1].role == "assistant":
            members["continue_final_message"] = True
        members["tools"] = self._tools() or None
        if self.tool_choice is not None:
            members["tool_choice"] = _tool_choice(self.tool_choice)
            members["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return members

    def _tools(self) -> list[ours.Tool]:
        """Return the tools that the prompt describes."""
        named = {tool.name for tool in self.tools or ()}
        referenced: set[str] = set()
        for i, turn in enumerate(self.messages):
            for name, where in references(turn.content, f"messages[{i}].content"):
                if name not in named:
                    raise InvalidRequest(f"{where}: {name!r} is not in tools", param="messages")
                referenced.add(name)
        tools = [(_tool(tool, i), tool) for i, tool in enumerate(self.tools or ())]
        return [made for made, tool in tools if not tool.defer_loading or tool.name in referenced]

    def _response_format(self) -> ours.ResponseFormat | None:
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is not None and self.output_format is not None:
            raise InvalidRequest(
                "output_format: cannot be combined with output_config.format, its new name", param="output_format"
            )
        wanted = wanted or self.output_format
        if wanted is None:
            return None
        return ours.ResponseFormat(type="json_schema", json_schema=ours.NamedSchema(schema=wanted.json_schema))


class MessagesRequest(Conversation, Extensions):
    """Body of `POST /v1/messages`."""

    id_prefix: ClassVar = "msg_"

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Default: 1. Greedy sampling: 0.")
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None

    # Fields of this server's other APIs.
    n: Annotated[Any, Only((1,))] = None
    stop: Refused = None
    response_format: Refused = None

    @property
    def end_user(self) -> str:
        """The client's user id, if the body has one."""
        return (self.metadata.user_id if self.metadata is not None else None) or ""

    def _members(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_p", *EXTENSIONS)
        user = self.metadata.user_id if self.metadata is not None else None
        members = super()._members() | {name: getattr(self, name) for name in same}
        return members | {"stop": self.stop_sequences or None, "user": user}


class CountTokensRequest(Conversation):
    """Body of `POST /v1/messages/count_tokens`."""


def _system(content: Content | None) -> Iterator[ours.Message]:
    if system := content_of(content, "system"):
        yield ours.Message(role="system", content=system)


def _messages(turn: Turn, where: str) -> Iterator[ours.Message]:
    """Yield the chat messages of one turn. Each tool result becomes a separate message."""
    if isinstance(turn.content, str):
        yield ours.Message(role=turn.role, content=turn.content)
        return
    thoughts: list[str] = []
    texts: list[ours.ContentPart] = []
    calls: list[ours.ToolCall] = []
    for j, block in enumerate(turn.content):
        if block.type in THOUGHTS:
            thoughts += [block.thinking] if block.thinking and turn.role == "assistant" else []
        elif block.type == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, f"{where}[{j}]"))
        elif block.type == "tool_result" and turn.role == "user":
            if texts:
                yield ours.Message(role="user", content=as_content(texts))
                texts = []
            yield _result(block, f"{where}[{j}]")
        else:
            if block.type != "text" and turn.role != "user":
                raise unsupported(f"{where}[{j}].type", f"{block.type!r} here")
            texts += parts_of(block, where, j)
    if texts or calls:
        content = as_content(texts) or (None if calls else "")
        thought = "\n".join(thoughts) or None
        yield ours.Message(role=turn.role, content=content, tool_calls=calls or None, reasoning_content=thought)


def _call(block: Block, where: str) -> ours.ToolCall:
    if block.id is None or block.name is None:
        raise InvalidRequest(f"{where}: a tool_use block must have an id and a name", param="messages")
    arguments = orjson.dumps(block.input or {}).decode()
    return ours.ToolCall(id=block.id, function=ours.FunctionCall(name=block.name, arguments=arguments))


def _result(block: Block, where: str) -> ours.Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}.tool_use_id: is required", param="messages")
    content = content_of(block.content, f"{where}.content", has_documents=True)
    if block.is_error:  # chat messages have no error flag
        if isinstance(content, str):
            content = f"Error: {content}"
        else:
            content = [content[0].model_copy(update={"text": f"Error: {content[0].text}"}), *content[1:]]
    return ours.Message(role="tool", content=content, tool_call_id=block.tool_use_id)


def _tool(tool: MessageTool, index: int) -> ours.Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"tools[{index}].type", f"{tool.type!r}, a tool of the server's,")
    if tool.name is None:
        raise InvalidRequest(f"tools[{index}].name: is required", param="tools")
    return function_tool(tool.name, tool.description, tool.input_schema)


def _tool_choice(choice: MessageToolChoice) -> str | ours.NamedTool:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: is required with type 'tool'", param="tool_choice")
    return named_tool(choice.name)
