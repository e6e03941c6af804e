"""The structs that Python shares with the native library: a difference is found when the library is loaded."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kernels.cpu.build import load_native
from kernels.cpu.structs import SHARED, LayoutError, OpStruct, StepStruct, WeightsStruct, check_layouts

pytestmark = pytest.mark.timeout(400)  # of compilers, on any machine


@pytest.fixture
def library() -> ctypes.CDLL:
    return load_native() or pytest.skip("no C++ compiler here")


def test_both_sides_agree(library: ctypes.CDLL) -> None:
    check_layouts(library)
    assert set(SHARED) == {"Op", "Step", "Weights", "Routing", "Lora", "LoraPart"}


def changed(struct: type[ctypes.Structure], **kinds: Any) -> type[ctypes.Structure]:
    """The struct with fields of other types, or without those whose type is None."""
    fields = [(name, kinds.get(name, kind)) for name, kind in struct._fields_]
    return type("Changed", (ctypes.Structure,), {"_fields_": [field for field in fields if field[1] is not None]})


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("Op", changed(OpStruct, width=ctypes.c_int32), "size of width is 8 in kernels/native, 4 in Changed"),
        (
            "Op",
            changed(OpStruct, weights=ctypes.c_void_p * 2),
            "size of weights is 24 in kernels/native, 16 in Changed",
        ),
        ("Step", changed(StepStruct, cores=None), "number of fields is 17 in kernels/native, 16 in Changed"),
        ("Weights", changed(WeightsStruct, data=ctypes.c_int32), "size of data is 8 in kernels/native, 4 in Changed"),
        ("Weights", OpStruct, "number of fields is 8 in kernels/native, 16 in OpStruct"),
    ],
)
def test_a_wrong_struct_is_named(library: ctypes.CDLL, name: str, wrong: type[ctypes.Structure], message: str) -> None:
    with pytest.raises(LayoutError, match=f"struct {name}: {message}"):
        check_layouts(library, {name: wrong})


def test_fields_in_another_order_are_named(library: ctypes.CDLL) -> None:
    data, scale, *others = WeightsStruct._fields_
    swapped = type("Swapped", (ctypes.Structure,), {"_fields_": [scale, data, *others]})
    with pytest.raises(LayoutError, match="struct Weights: field at 0 is data in kernels/native, scale in Swapped"):
        check_layouts(library, {"Weights": swapped})
