"""Writes `oneOf` as `anyOf` of cases that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.text.schema.disjoint import Flat, Proofs
from router.text.schema.finite import key_of, listed, names
from router.text.schema.keywords import Schema, Unenforceable
from router.text.schema.negation import Negation, all_of

MAX_CASES = 256
"""Each two of them are compared."""
MAX_MEMBERS = 32
"""Required members, one of which may tell all cases apart."""
MAX_OVERLAPPING = 24
"""Cases of which some may overlap: each of them then says `not` of those others."""


def exclusive(
    cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs, negation: Negation, place: str
) -> list[Schema]:
    """Cases of which exactly one matches where one matches, given all that is `beside` them. Raises Unenforceable."""
    if len(cases) < 2 or _differ_in_a_member(cases, beside, proofs):
        return list(cases)
    if len(cases) > MAX_CASES:
        raise Unenforceable(
            place, f"more than {MAX_CASES} cases of a `oneOf` without a required member that tells them apart"
        )
    overlapping = _overlapping(cases, beside, proofs)
    if overlapping and len(cases) > MAX_OVERLAPPING:
        raise Unenforceable(place, f"more than {MAX_OVERLAPPING} cases of a `oneOf`, some of which may overlap")
    found = []
    for i, case in enumerate(cases):
        flat = proofs.flat(case, beside)
        others = [j for j in range(len(cases)) if (min(i, j), max(i, j)) in overlapping]
        denied = (_denied(cases[j], flat, negation, f"{place}/{j}") for j in others)
        found.append(all_of([case, *denied]))
    return found


def _denied(case: Schema, beside: Flat, negation: Negation, place: str) -> Schema:
    try:
        return negation.negated(case, beside, place)
    except Unenforceable as error:
        raise Unenforceable(place, f"this case of a `oneOf` may overlap with another, and {error.why}") from error


def _overlapping(cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs) -> set[tuple[int, int]]:
    """Pairs of cases that may both match."""
    return {(j, i) for i in range(len(cases)) for j in range(i) if not proofs.is_impossible(cases[i], cases[j], beside)}


def _differ_in_a_member(cases: Sequence[Schema], beside: Mapping[str, Any], proofs: Proofs) -> bool:
    """Whether all cases are objects that list other values for the same required member: its kind, mostly."""
    flats = [proofs.flat(case, beside) for case in cases]
    required = [frozenset(name for part in flat.parts for name in names(part)) for flat in flats]
    if any(flat.types() != {"object"} for flat in flats):
        return False
    candidates = sorted(frozenset.intersection(*required))[:MAX_MEMBERS]
    return any(_tells_apart(name, flats) for name in candidates)


def _tells_apart(name: str, flats: Sequence[Flat]) -> bool:
    seen: set[str] = set()
    for flat in flats:
        values = next((values for child in flat.members(name) if (values := listed(child)) is not None), None)
        if values is None or not seen.isdisjoint(own := set(map(key_of, values))):
            return False
        seen |= own
    return True


def alone(schema: Mapping[str, Any]) -> dict[str, Any]:
    """All that a schema says beside its `oneOf`."""
    return {key: value for key, value in schema.items() if key != "oneOf"}
