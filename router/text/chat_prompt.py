"""Renders a conversation into the text of a prompt, optionally with an open last message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.model_files.template import ChatTemplate
from router.text.conversation import template_messages
from router.text.tools import Function, describes_tools, tools_as_text, uses_tools

OPEN_END = "\ue0f1OPEN-END\ue0f1"  # no template contains private use characters


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    functions: Sequence[Function] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt, to be encoded without special tokens. Raises InvalidRequest when it cannot be rendered."""
    if not messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    plain = template_messages(messages, has_developer="developer" in (template.source or ""))
    tools = [function.as_tool() for function in functions] or None
    if not describes_tools(template.source) and (functions or any(map(uses_tools, plain))):
        plain, tools = tools_as_text(plain, functions), None
    if not continue_final_message:
        return template.render(plain, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra)
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: set the latter to false",
            param="continue_final_message",
        )
    return _open_ended(template, plain, tools, extra)


def _open_ended(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any] | None,
) -> str:
    """Mark where the last message ends and cut the prompt there, as transformers' `apply_chat_template` does."""
    content = messages[-1]["content"]
    marked = [*messages[:-1], {**messages[-1], "content": content + OPEN_END}]
    text, mark, _ = template.render(marked, tools=tools, add_generation_prompt=False, extra=extra).rpartition(OPEN_END)
    if not mark:
        raise InvalidRequest("the chat template hides the last message: it cannot be continued", param="messages")
    return text
