"""Rewrites what a schema says about an array's items in ways that llguidance does not know."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

from router.text.schema.disjoint import Proofs
from router.text.schema.finite import key_of, listed, number, sequence
from router.text.schema.keywords import TYPES, Schema, Unenforceable
from router.text.schema.negation import MAX_ITEMS, any_of

MAX_PLACES = 16
"""Of an item that an array must contain."""
MAX_UNIQUE = 4
"""Values whose every order is written out: 64 arrays."""
NO_ARRAY = {"type": [name for name in TYPES if name != "array"]}


def containing(schema: Mapping[str, Any], place: str) -> list[Schema]:
    """Schemas that together say what `contains` and its bounds do. Raises Unenforceable."""
    wanted, least, most = schema["contains"], number(schema, "minContains"), number(schema, "maxContains")
    least = 1 if least is None else int(least)
    if wanted is True or wanted == {}:
        return [{"minItems": least}, *([] if most is None else [{"maxItems": int(most)}])]
    if most is not None:
        raise Unenforceable(place, "`maxContains` cannot be enforced")
    if least == 0:
        return []
    longest = number(schema, "maxItems")
    if least > 1 or longest is None or longest > MAX_PLACES:
        what = "`contains`" if least == 1 else f"`minContains` {least}"
        raise Unenforceable(place, f"{what} can be enforced for one of at most {MAX_PLACES} items (`maxItems`)")
    ways = [{"prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(int(longest))]
    return [any_of([NO_ARRAY, *({"type": "array", **way} for way in ways)])]


def unique(schema: Mapping[str, Any], proofs: Proofs, place: str) -> Schema:
    """A schema that says what `uniqueItems` does. Raises Unenforceable."""
    longest, first, items = number(schema, "maxItems"), sequence(schema, "prefixItems"), schema.get("items", True)
    if items is False:
        longest = len(first) if longest is None else min(longest, len(first))
    if longest is not None and longest <= 1:
        return True
    if longest is not None and longest <= min(len(first), MAX_ITEMS):
        heads = first[: int(longest)]
        if all(proofs.are_disjoint(a, b) for i, a in enumerate(heads) for b in heads[:i]):
            return True
    values = _values(items)
    if values is None or len(values) > MAX_UNIQUE or first:
        why = f"`uniqueItems` can be enforced for items of at most {MAX_UNIQUE} listed values, and for at most one item"
        raise Unenforceable(place, why)
    sizes = range(min(len(values), int(len(values) if longest is None else longest)) + 1)
    return any_of([NO_ARRAY, {"enum": [list(order) for size in sizes for order in permutations(values, size)]}])


def _values(items: Schema) -> list[Any] | None:
    """All values that items may have, each once; None if they are not listed."""
    found = listed(items)
    if found is None and isinstance(items, Mapping):
        by_type: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        found = by_type.get(str(items.get("type")))
    return None if found is None else list({key_of(value): value for value in found}.values())
