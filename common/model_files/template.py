"""Renders a conversation into a prompt with the model's chat template, following Hugging Face's conventions.

Source: transformers' `chat_template_utils`: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson`
without HTML escaping, `{% generation %}`. The template runs in a sandbox, and cannot change its inputs or access the
process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from traceback import walk_tb
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, ModelError
from common.model_files.files import ModelFiles

MAX_REASON_CHARS = 200
"""Maximum length of a template's error that a client sees."""
TEMPLATE_FILENAME = "<template>"
"""Filename of a template in Jinja's tracebacks."""
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))


class _Generation(Extension):
    """Renders the body of `{% generation %}` unchanged. The tag marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as in transformers


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compiled(source: str) -> jinja2.Template:
    template = _environment().from_string(source)
    template.globals = dict(template.globals)  # each render copies this, and Jinja's ChainMap is slow to copy
    return template


class ContentForm(StrEnum):
    """Forms of message content that a template supports: a string, a list of text parts, or either."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


FIRST, SECOND = "\ue0f2first\ue0f2", "\ue0f2second\ue0f2"  # no template contains private use characters
PARTS = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_0001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
BEFORE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "system": (),
    "developer": (),
    "user": (),
    "assistant": (USER,),
    "tool": (USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
}
"""Messages that precede a message of each role."""


class ChatTemplate:
    """Compiled chat template of a model. `source` is None for a base model, for which `render` always fails.

    `with_tools` is the template for requests with tools: a separate one if the model has it (`tool_source`), otherwise
    this one. Raises ModelError if a source is not valid Jinja.
    """

    def __init__(
        self,
        source: str | None,
        *,
        model_id: str = "",
        bos_token: str = "",
        eos_token: str = "",
        tool_source: str | None = None,
    ) -> None:
        self.source, self._model_id = source, model_id
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = None if source is None else _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template of {model_id} has an error in line {error.lineno}: {error}") from error
        except RecursionError as error:
            raise ModelError(f"the chat template of {model_id} is nested too deeply") from error
        self.with_tools = self
        if tool_source is not None:
            self.with_tools = ChatTemplate(tool_source, model_id=model_id, bos_token=bos_token, eos_token=eos_token)

    @classmethod
    def from_files(cls, files: ModelFiles) -> ChatTemplate:
        """Return the template of a resolved model."""
        return cls(
            files.chat_template,
            model_id=files.model_id,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            tool_source=files.tool_template,
        )

    @cached_property
    def content_forms(self) -> Mapping[str, ContentForm]:
        """Content forms that the template supports, by role. Determined by rendering both forms.

        Like transformers, passes content unchanged: a template that loops over parts decides how to join them.
        """
        return {role: self._content_form(role) for role in BEFORE}

    @classmethod
    def problem_of(cls, source: str) -> str:
        """Return why a template cannot render a user message, with the line, or "" if it can."""
        try:
            template = cls(source)
            if FIRST in template._shown("user", PARTS) or FIRST in template.render([{**USER, "content": FIRST}]):
                return ""
        except (ModelError, InvalidRequest) as error:
            cause = error.__cause__ or error
            steps = walk_tb(cause.__traceback__)
            lines = [line for frame, line in steps if frame.f_code.co_filename == TEMPLATE_FILENAME]
            lines += [cause.lineno] if isinstance(cause, jinja2.TemplateSyntaxError) else []
            return (f"line {lines[-1]}: " if lines else "") + (str(cause)[:MAX_REASON_CHARS] or type(cause).__name__)
        return "it omits the user's message"

    def _content_form(self, role: str) -> ContentForm:
        """Determine the form for a role. A template that prints the list itself does not support parts."""
        _, is_shown, rest = self._shown(role, PARTS).partition(FIRST)
        between, is_second, _ = rest.partition(SECOND)
        if not is_shown or not is_second or "type" in between:
            return ContentForm.TEXT
        return ContentForm.EITHER if FIRST in self._shown(role, FIRST) else ContentForm.PARTS

    def _shown(self, role: str, content: Any) -> str:
        """Render a short conversation with this message, or return "" if the template rejects it."""
        message = {"role": role, "content": content} | ({"tool_call_id": CALL["id"]} if role == "tool" else {})
        after = () if BEFORE[role] or role == "user" else (USER,)
        try:
            return self.render([*BEFORE[role], message, *after], add_generation_prompt=False)
        except InvalidRequest:
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages` (as in OpenAI's API) into a prompt, which is then encoded without special tokens.

        `extra` has further template variables (`enable_thinking`, ...). Raises InvalidRequest if the model has no
        template or the template rejects the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                f"The model {self._model_id!r} has no chat template (it is a base model): use /v1/completions",
                param="messages",
            )
        taken = RESERVED.intersection(extra or ())
        if taken:
            raise InvalidRequest(
                f"Chat template variables must not include {', '.join(sorted(taken))}", param="messages"
            )
        try:
            return self._template.render(
                **(extra or {}),
                **self._tokens,
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # the template computes with the client's data and may raise anything
            reason = str(error)[:MAX_REASON_CHARS] or type(error).__name__
            raise InvalidRequest(f"The chat template rejects these messages: {reason}", param="messages") from error
