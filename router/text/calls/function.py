"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from router.text.answer_grammar import ANY_OBJECT, enforceable
from router.text.schema import Document, Shapes, canonical

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that a model may call. `parameters` is the JSON schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """The form of OpenAI's API and of chat templates."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters or ANY_OBJECT}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}

    @cached_property
    def arguments(self) -> Document:
        """The schema of the arguments, in keywords that grammars enforce. References refer to the function's document.

        Arguments are always an object, whatever type the schema has. Keywords that cannot be enforced are ignored.
        Raises Unenforceable, a ValueError, for an undefined reference and for schemas beyond the bounds.
        """
        document = canonical(NO_ARGUMENTS if self.parameters is None else self.parameters)
        return enforceable(replace(document, root={**document.root, **ANY_OBJECT}), lenient=True)

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the arguments. Raises as `arguments` does."""
        return Shapes(self.arguments)

    def read(self) -> None:
        """Compute and cache the shapes. Raises as `arguments` does."""
        _ = self.shapes
