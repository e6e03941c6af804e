"""Translation of parts of other APIs' requests to OpenAI chat requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from common.errors import InvalidRequest, RequestError
from router.request.errors import unsupported
from router.request.fields import ContentPart, FunctionDefinition, FunctionName, NamedTool, Tool


class MessagePart(Protocol):
    """One part of a message. Only parts with text are supported."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...


def text_content(
    parts: Sequence[MessagePart], kinds: Collection[str], where: str, *, first: int = 0
) -> list[ContentPart]:
    """Convert text parts to parts of a chat message. `where` is the path of the list, and `first` its first index.

    Raises InvalidRequest for a part whose type is not in `kinds`, or that has no text.
    """
    for j, part in enumerate(parts, start=first):
        if part.type not in kinds:
            raise unsupported(f"{where}[{j}].type", f"{part.type!r} here")
        if part.text is None:
            raise InvalidRequest(f"{where}[{j}].text: is required", param=where.partition("[")[0])
    return [ContentPart(type="text", text=part.text, refusal=None) for part in parts]


def as_content(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return the parts as content of a chat message. A single part becomes a string."""
    return parts if len(parts) > 1 else "".join([part.text or "" for part in parts])


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field that an error raised inside refers to, if it begins with one of `names`."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        known = next((name for name in names if param.startswith(name)), None)
        if known is not None:
            error.param = names[known] + param.removeprefix(known)
            if error.message.startswith(param):
                error.message = error.param + error.message.removeprefix(param)
        raise


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, description=description, parameters=parameters))


def named_tool(name: str) -> NamedTool:
    """Return the tool choice that selects this tool."""
    return NamedTool(type="function", function=FunctionName(name=name))
