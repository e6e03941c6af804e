"""The structs that Python and `native/` share, and what compares both sides when the library is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from kernels.interface import Routing

EMBED, NORM, QUANTISE, LINEAR, ROTATE, ATTEND, SELECT = range(7)
ROUTE, GROUP, SPREAD, EXPERTS, COMBINE, ADD_GATED, HEADS, LATENTS, LORA, GATE = range(7, 17)
OP_NAMES: Final = (
    *("embed", "norm", "quantise", "linear", "rotate", "attend", "select"),
    *("route", "group", "spread", "experts", "combine", "add gated", "heads", "latents", "lora", "gate"),
)
ALL_ROWS, SAMPLED_ROWS = 0, 1
EPILOGUES: Final = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
NORMALISED, SIGMOID = 1, 2
"""Flags of a route."""
WIDE: Final = 16
"""Flag, combined with an epilogue: the product is stored in float32."""


class OpStruct(ctypes.Structure):
    """`struct Op`: one operation of a program. Buffers are named by number, -1 for none."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("input", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("extra", ctypes.c_int64),
        ("extra2", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("weights", ctypes.c_void_p * 3),
        ("scale", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("value_scale", ctypes.c_double),
        ("per_token", ctypes.c_int64),
        ("units", ctypes.c_int64),
    )


class StepStruct(ctypes.Structure):
    """`struct Step`: what differs from step to step."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("num_units", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("cores", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
    )


class WeightsStruct(ctypes.Structure):
    """`struct Weights`: one matrix, packed."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class RoutingStruct(ctypes.Structure):
    """`struct Routing`: `interface.routing.Routing` without its correction."""

    _fields_ = (
        ("per_token", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("kept_groups", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )

    @classmethod
    def of(cls, routing: Routing) -> RoutingStruct:
        flags = (NORMALISED if routing.normalised else 0) | (SIGMOID if routing.sigmoid else 0)
        return cls(routing.per_token, flags, routing.groups, routing.kept_groups, routing.scale)


MOST_PARTS: Final = 3
"""Maximum number of parts of a matrix with adapters: q, k and v."""


class LoraPartStruct(ctypes.Structure):
    """`struct LoraPart`: some outputs of a matrix."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("b", ctypes.c_void_p),
    )


class LoraStruct(ctypes.Structure):
    """`struct Lora`: what one adapter changes at one matrix."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("parts", LoraPartStruct * MOST_PARTS),
    )


SHARED: Final[Mapping[str, type[ctypes.Structure]]] = {
    **{"Op": OpStruct, "Step": StepStruct},
    **{"Weights": WeightsStruct, "Routing": RoutingStruct},
    **{"Lora": LoraStruct, "LoraPart": LoraPartStruct},
}


class LayoutError(RuntimeError):
    """A struct differs between Python and the library."""


class FieldStruct(ctypes.Structure):
    """`struct Field`: what the library says of one field."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


def check_layouts(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]] = SHARED) -> None:
    """Compares name, offset and size of every field with the library's. LayoutError names the first difference."""
    fields_of = library.diptych_fields
    fields_of.argtypes, fields_of.restype = [ctypes.c_char_p, ctypes.c_void_p], ctypes.POINTER(FieldStruct)
    for name, struct in structs.items():
        count = ctypes.c_int64()
        whole, *fields = fields_of(name.encode(), ctypes.addressof(count))[: count.value]
        names = [field[0] for field in struct._fields_]
        found: list[tuple[str, object, object]] = [("number of fields", len(fields), len(names))]
        for native, field in zip(fields, names, strict=False):
            ours = getattr(struct, field)
            found += [
                (f"field at {native.offset}", native.name.decode(), field),
                (f"offset of {field}", native.offset, ours.offset),
                (f"size of {field}", native.size, ours.size),
            ]
        found.append(("size", whole.size, ctypes.sizeof(struct)))
        for what, theirs, mine in found:
            if theirs != mine:
                raise LayoutError(f"struct {name}: {what} is {theirs} in kernels/native, {mine} in {struct.__name__}")
