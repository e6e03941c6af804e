"""What other APIs' requests have in common on their way to becoming conversations of our own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from common.errors import InvalidRequest, RequestError
from router.request.errors import unsupported
from router.request.fields import FunctionDefinition, FunctionName, NamedTool, Tool


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


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name the fields of another API where ours begin with one of `names`."""
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
    """The choice of this tool."""
    return NamedTool(type="function", function=FunctionName(name=name))
