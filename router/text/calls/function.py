"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from router.text.answer.grammar import ANY_OBJECT

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(NamedTuple):
    """A function that a model may call. `parameters` is the JSON schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """The form of OpenAI's API and of chat templates."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, which are an object whatever a client calls them."""
        return NO_ARGUMENTS if self.parameters is None else {**self.parameters, **ANY_OBJECT}
