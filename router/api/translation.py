"""What other APIs' requests have in common on their way to becoming conversations of our own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from diptych.common.errors import InvalidRequest
from diptych.router.api.errors import unsupported
from diptych.router.api.fields import FunctionDefinition, FunctionName, NamedTool, Tool


class TextPart(Protocol):
    """One part of a message, of which only text is understood."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...


def joined_text(parts: Sequence[TextPart], kinds: Collection[str], where: str, *, first: int = 0) -> str:
    """The texts of parts, one after the other; `where` names the list, `first` is the place in it of the first one.

    Raises InvalidRequest for a part of another type than `kinds`, or without a text.
    """
    for j, part in enumerate(parts, start=first):
        if part.type not in kinds:
            raise unsupported(f"{where}[{j}].type", f"{part.type!r} here")
        if part.text is None:
            raise InvalidRequest(f"{where}[{j}].text: is required", param=where.partition("[")[0])
    return "".join([part.text or "" for part in parts])


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, description=description, parameters=parameters))


def named_tool(name: str) -> NamedTool:
    """The choice of this tool."""
    return NamedTool(type="function", function=FunctionName(name=name))
