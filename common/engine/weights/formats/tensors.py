"""What a layout asks of a checkpoint: its tensors, and their heads before anything of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from common.errors import ModelError

SCALE_TYPES: Final = ("F16", "BF16", "F32")
"""Of the scales of integers, as every tool writes them."""
PACKED: Final = ".qweight"
"""Ends the name of a tensor of words of AWQ and of GPTQ."""


@dataclass(frozen=True, slots=True)
class TensorHead:
    """Type, by safetensors' name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class CheckpointTensors(Protocol):
    """The tensors of a checkpoint as the file holds them."""

    @property
    def label(self) -> str: ...

    def has(self, name: str) -> bool: ...

    def head(self, name: str) -> TensorHead: ...

    def tensor(self, name: str) -> Tensor: ...


def expect(
    tensors: CheckpointTensors, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...], why: str = ""
) -> TensorHead:
    """The head of a tensor. ModelError unless it is there, of one of the types, and of one of the shapes, if any."""
    if not tensors.has(name):
        raise ModelError(f"{tensors.label}: no tensor {name}, which its quantised matrix needs: fetch the model again")
    head = tensors.head(name)
    if head.dtype not in dtypes:
        raise ModelError(f"{tensors.label}: tensor {name} has type {head.dtype}; {' or '.join(dtypes)} are read")
    if shapes and head.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ModelError(
            f"{tensors.label}: tensor {name} is {list(head.shape)}, {why or 'its quantised matrix'} wants {wanted}: "
            "the file does not match its quantization_config, fetch the model again"
        )
    return head
