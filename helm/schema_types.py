"""Building blocks of the schema of the chart values, for write_schema.py: JSON Schema, draft 7."""

from __future__ import annotations

from typing import Any

from common.config import RouterConfig
from common.config.field import Field, fields_of
from router.models.models_file import NAME as SERVED_NAME

Schema = dict[str, Any]

LABEL = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
KEYWORD = {str: "string", int: "integer", float: "number", bool: "boolean"}


def closed(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    """An object with these keys and no others."""
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def named(entry: Schema, most: int = 0) -> Schema:
    """Entries by name; an overlay removes one with null. Lists pass: templates refuse them and print the map."""
    either = entry | {"type": ["object", "null"]}
    schema: Schema = {"type": ["object", "array"], "propertyNames": NAME, "additionalProperties": either}
    return schema | ({"maxProperties": most} if most else {})


def text(*choices: str, pattern: str = "") -> Schema:
    schema: Schema = {"type": "string"}
    if choices:
        schema["enum"] = list(choices)
    return schema | ({"pattern": pattern} if pattern else {})


def whole(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
NAME = text(pattern=LABEL)
SERVED = text(pattern=rf"^{SERVED_NAME.pattern}$")
"""Model name for clients."""
FREE: Schema = {"type": "object"}
MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
MAP_OR_NOTHING: Schema = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
"""Texts by key; null drops a key that would be inherited."""
COUNT_OR_SHARE: Schema = {"anyOf": [whole(0), text(pattern=r"^[0-9]+%$")]}
LIST_OF_OBJECTS = many(FREE)

# Formats that the API server demands.
LABEL_VALUE = text(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")
LABELS: Schema = {"type": "object", "additionalProperties": LABEL_VALUE}
LABELS_OR_NOTHING: Schema = {"type": "object", "additionalProperties": LABEL_VALUE | {"type": ["string", "null"]}}
SIZE = r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]|[eE][0-9]+)?"
BYTES = text(pattern=f"^{SIZE}$")
BYTES_OR_NOTHING = text(pattern=f"^({SIZE})?$")
_AMOUNT: Schema = {"type": ["string", "number", "null"], "minimum": 0}
AMOUNTS: Schema = {
    "type": "object",
    # `8m` of memory is eight thousandths of a byte.
    "patternProperties": {"^(memory|ephemeral-storage|hugepages-.*)$": _AMOUNT | {"pattern": f"^{SIZE}$"}},
    "additionalProperties": _AMOUNT | {"pattern": rf"^{SIZE}$|^[0-9]+m$"},
}
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
CIDR = text(
    pattern=rf"^({_OCTET}(\.{_OCTET}){{3}}/(3[0-2]|[12]?[0-9])|[0-9a-fA-F:]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)


def of_field(field: Field) -> Schema:
    """Schema of a setting."""
    rule = field.rule
    schema: Schema = {"description": rule.help}
    if field.type in KEYWORD:
        schema["type"] = KEYWORD[field.type]
    else:
        schema |= {"type": "array", "items": {"type": "string"}}
    if rule.choices:
        schema["enum"] = list(rule.choices)
    if rule.ge is not None:
        schema["minimum"] = rule.ge
    if rule.le is not None:
        schema["maximum"] = rule.le
    return schema


def of_price() -> Schema:
    """Price of a pod, with the rule of the router's settings, which is the same for both roles."""
    (field,) = (field for field in fields_of(RouterConfig) if field.name == "price_decode")
    return of_field(field) | {"description": "what a pod costs, in units of the router's max_cost"}
