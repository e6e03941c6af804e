"""Rendering of a conversation as the text of a prompt, optionally with an open last message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from common.errors import InvalidRequest
from common.model_files import ChatTemplate
from router.text.calls import Dialect, Function, dialect_of
from router.text.conversation import in_content_forms, template_messages
from router.text.tools import tools_as_text, uses_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
OPEN_END = "\ue0f1OPEN-END\ue0f1"  # no template contains private use characters
SPACED_END = f"{OPEN_END} "
MARKED = re.compile(rf"{OPEN_END}([0-9]+){OPEN_END}")


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    functions: Sequence[Function] = (),
    dialect: Dialect | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Render the prompt, to be encoded without special tokens. Raises InvalidRequest if that fails.

    `dialect` is detected from `template.with_tools` if it is None. As in transformers, a separate template for tools
    renders only requests with `functions`. It is not used if its format of calls is unknown.
    """
    if not messages:
        raise InvalidRequest("messages: must contain at least one message", param="messages")
    dialect = dialect or dialect_of(template.with_tools)
    if functions and dialect.native:
        template = template.with_tools
    elif not functions and template.with_tools is not template:
        dialect = _without_tools(template, dialect)
    plain = template_messages(messages, has_developer="developer" in (template.source or ""))
    tools = [function.as_tool() for function in functions] or None
    if dialect.native:
        plain = dialect.messages(plain)
    elif functions or any(map(uses_tools, plain)):
        plain, tools = tools_as_text(plain, functions, dialect.format), None
    plain = in_content_forms(plain, template.content_forms)
    _check_roles(template, plain, tools, extra)
    if not continue_final_message:
        return template.render(plain, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra)
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: must not be combined with add_generation_prompt; set one of them to false",
            param="continue_final_message",
        )
    return _open_ended(template, plain, tools, extra)


@lru_cache(maxsize=64)
def _without_tools(template: ChatTemplate, dialect: Dialect) -> Dialect:
    """Return the dialect of a template for requests without tools, whose messages may contain earlier calls.

    If the template does not render calls, they are written in the format of `dialect`.
    """
    own = dialect_of(template)
    return own if own.native else replace(dialect, native=False)


def _check_roles(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """Raise InvalidRequest for a non-standard role whose messages the template omits."""
    marks = {i: f"{OPEN_END}{i}{OPEN_END}" for i, message in enumerate(messages) if message["role"] not in ROLES}
    if not marks:
        return
    marked = [{**message, "content": marks.get(i, message["content"])} for i, message in enumerate(messages)]
    text = template.render(marked, tools=tools, add_generation_prompt=False, extra=extra)
    shown = set(MARKED.findall(text))  # one pass for any number of marked messages
    hidden = next((i for i in marks if str(i) not in shown), None)
    if hidden is not None:
        where = f"messages[{hidden}].role"
        role = messages[hidden]["role"]
        raise InvalidRequest(f"{where}: the chat template of this model does not support role {role!r}", param=where)


def _open_ended(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any] | None,
) -> str:
    """Mark where the last message ends and cut the prompt there, as transformers' `apply_chat_template` does.

    A template that trims the message would trim trailing space before the mark, too, so it is cut off.
    """
    content = messages[-1]["content"]
    said = content
    if isinstance(content, list):
        *before, last = content or [{"type": "text", "text": ""}]
        said = last["text"]
        content = [*before, {**last, "text": said + SPACED_END}]
    else:
        content += SPACED_END
    marked = [*messages[:-1], {**messages[-1], "content": content}]
    shown = template.render(marked, tools=tools, add_generation_prompt=False, extra=extra)
    text, mark, rest = shown.rpartition(OPEN_END)
    if not mark:
        raise InvalidRequest("The chat template omits the last message, so it cannot be continued.", param="messages")
    return text if rest.startswith(SPACED_END[-1]) else text.removesuffix(said[len(said.rstrip()) :])
