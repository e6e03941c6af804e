"""Fields of other servers that this one does not have, and must not ignore because they change the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from common.errors import MAX_SHOWN_CHARS
from router.request.errors import NOT_HERE

NOTHING: tuple[object, ...] = (False, "", [], {})


@dataclass(frozen=True, slots=True)
class Only:
    """Annotates a field that may only be null or one of `same`: values that ask for what this server does anyway."""

    same: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.same], "description": "nothing else is supported by this server"}

    def _checked(self, value: object) -> object:
        if value is None or any(type(value) is type(same) and value == same for same in self.same):
            return value
        shown = repr(value)[:MAX_SHOWN_CHARS] if type(value) in (str, int, float) else "this field"
        raise PydanticCustomError(NOT_HERE, "{what} is not supported by this server", {"what": shown})


Refused = Annotated[Any, Only(NOTHING)]
