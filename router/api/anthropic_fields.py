"""What clients of Anthropic's Messages API send, and the conversation of our own API that it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from diptych.common.errors import InvalidRequest
from diptych.common.sampling_params import MAX_GRAMMAR_CHARS
from diptych.router.api import fields as ours
from diptych.router.api.errors import unsupported
from diptych.router.api.fields import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, Fields, StopText
from diptych.router.api.translation import function_tool, joined_text, named_tool

TEXT = frozenset(("text",))
UNSEEN = frozenset(("thinking", "redacted_thinking"))
"""Blocks of earlier answers that models are not shown again."""


class Block(Fields):
    """One part of a message. Which members it has depends on its type."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = Field(None, description='with type "text"')
    id: Annotated[str, Field(max_length=256)] | None = Field(None, description='with type "tool_use"')
    name: Annotated[str, Field(max_length=64)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = Field(None, description='with type "tool_result"')
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None


Content = str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Turn(Fields):
    role: Literal["user", "assistant"]
    content: Content


class MessageTool(Fields):
    type: Annotated[str, Field(max_length=64)] | None = Field(None, description='null or "custom"')
    name: Annotated[str, Field(pattern=ours.FUNCTION_NAME)]
    description: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    input_schema: dict[str, Any] | None = None


class MessageToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=64)] | None = Field(None, description='with type "tool"')
    disable_parallel_tool_use: bool | None = None


class Metadata(Fields):
    user_id: Annotated[str, Field(max_length=4096)] | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]


class Conversation(Fields):
    """What `/v1/messages` and `/v1/messages/count_tokens` share: all that the prompt is made of."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="null: the served model")
    messages: Annotated[
        list[Turn],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(ours.not_too_many_parts),
    ]
    system: Content | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None

    def as_chat(self) -> ChatRequest:
        """The same of our own API. Raises InvalidRequest."""
        return ChatRequest(**self._members())

    def longest_text(self) -> str | list[int]:
        """Of the last message: templates leave others out."""
        content = self.messages[-1].content
        return content if isinstance(content, str) else ""

    def _members(self) -> dict[str, Any]:
        messages = list(_system(self.system))
        for i, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{i}].content")
        if not messages:
            raise InvalidRequest("messages: there is no text in them", param="messages")
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        members: dict[str, Any] = {"model": self.model, "messages": messages, "include_reasoning": thinks}
        members["chat_template_kwargs"] = {"enable_thinking": thinks}  # for templates that know of it
        if self.messages[-1].role == "assistant" and messages[-1].role == "assistant":
            members["continue_final_message"] = True
        if self.tools:
            members["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            members["tool_choice"] = _tool_choice(self.tool_choice)
            members["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return members


class MessagesRequest(Conversation):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="default 1; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None

    def _members(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        user = self.metadata.user_id if self.metadata is not None else None
        members = super()._members() | {name: getattr(self, name) for name in same}
        return members | {"stop": self.stop_sequences or None, "user": user}


class CountTokensRequest(Conversation):
    """`POST /v1/messages/count_tokens`."""


def _system(content: Content | None) -> Iterator[ours.Message]:
    text = content if isinstance(content, str) else joined_text(content or (), TEXT, "system")
    if text:
        yield ours.Message(role="system", content=text)


def _messages(turn: Turn, where: str) -> Iterator[ours.Message]:
    """What one turn is in our API, where results of calls are messages of their own."""
    if isinstance(turn.content, str):
        yield ours.Message(role=turn.role, content=turn.content)
        return
    texts: list[str] = []
    calls: list[ours.ToolCall] = []
    for j, block in enumerate(turn.content):
        if block.type == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, f"{where}[{j}]"))
        elif block.type == "tool_result" and turn.role == "user":
            if texts:
                yield ours.Message(role="user", content="".join(texts))
                texts = []
            yield _result(block, f"{where}[{j}]")
        elif block.type not in UNSEEN:
            texts.append(joined_text([block], TEXT, where, first=j))
    text = "".join(texts)
    if texts or calls:
        yield ours.Message(role=turn.role, content=text or (None if calls else ""), tool_calls=calls or None)


def _call(block: Block, where: str) -> ours.ToolCall:
    if block.id is None or block.name is None:
        raise InvalidRequest(f"{where}: a tool_use block has an id and a name", param="messages")
    arguments = orjson.dumps(block.input or {}).decode()
    return ours.ToolCall(id=block.id, function=ours.FunctionCall(name=block.name, arguments=arguments))


def _result(block: Block, where: str) -> ours.Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}.tool_use_id: is required", param="messages")
    text = (
        block.content if isinstance(block.content, str) else joined_text(block.content or (), TEXT, f"{where}.content")
    )
    return ours.Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _tool(tool: MessageTool, index: int) -> ours.Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"tools[{index}].type", f"{tool.type!r}, a tool of the server's,")
    return function_tool(tool.name, tool.description, tool.input_schema)


def _tool_choice(choice: MessageToolChoice) -> str | ours.NamedTool:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: is required with type 'tool'", param="tool_choice")
    return named_tool(choice.name)
