"""Interface of a weight format: how a safetensors checkpoint describes and stores its quantised matrices.

A format is a file in this folder and an entry in `registry.FORMATS`. `common/model_files/weight_scheme.py` reads its
configuration and refuses those that it would misinterpret; the tensors of each matrix determine bits and groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol, Self

from torch import Tensor

from common.engine.weights.formats.stored import StoredTensor, TensorHead
from common.errors import ModelError
from common.model_files import FormatName, WeightScheme
from kernels import QuantisedWeight

SCALE_TYPES: Final = ("F16", "BF16", "F32")
"""Types of integer formats' scales, in all tools."""


class CheckpointTensors(Protocol):
    """Tensors of a checkpoint as stored in the file."""

    @property
    def label(self) -> str: ...

    def has(self, name: str) -> bool: ...

    def head(self, name: str) -> TensorHead: ...

    def tensor(self, name: str) -> Tensor: ...


def expect(
    tensors: CheckpointTensors, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...], why: str = ""
) -> TensorHead:
    """Return the head of a tensor. Raises ModelError if it is missing or has another type or shape."""
    if not tensors.has(name):
        raise ModelError(f"{tensors.label}: missing tensor {name} of a quantised matrix: download the model again")
    head = tensors.head(name)
    if head.dtype not in dtypes:
        raise ModelError(f"{tensors.label}: tensor {name} has type {head.dtype}, must be {' or '.join(dtypes)}")
    if shapes and head.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ModelError(
            f"{tensors.label}: tensor {name} is {list(head.shape)}, {why or 'its quantised matrix'} requires {wanted}: "
            "the file does not match its quantization_config, download the model again"
        )
    return head


class StoredMatrix(Protocol):
    """A matrix, or a stack of them, as stored: small numbers with scales."""

    def dense(self) -> Tensor:
        """Return the matrix in float32."""

    def held(self) -> QuantisedWeight | None:
        """Return the matrix for quantised kernels; None if no kernel supports it."""


class WeightFormat(ABC):
    """Mapping from the tensors of a module to its matrix. One instance reads one checkpoint.

    name   name in `WeightScheme.format` and in messages
    """

    name: ClassVar[FormatName]

    @classmethod
    @abstractmethod
    def of(cls, scheme: WeightScheme) -> Self:
        """Create the format of a checkpoint."""

    def module(self, name: str) -> str:
        """Return the module that a tensor of the file may belong to."""
        return name.rpartition(".")[0] if "." in name else name

    @abstractmethod
    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        """Return whether the module is quantised. Otherwise the file has a plain tensor."""

    @abstractmethod
    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        """Return whether a quantised module is read as integers, as opposed to floats."""

    @abstractmethod
    def check(self, tensors: CheckpointTensors, module: str) -> None:
        """Raise ModelError if a module's tensors are inconsistent. Reads only their heads."""

    @abstractmethod
    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        """Describe a quantised module by its largest part, excluding scales."""

    @abstractmethod
    def read(self, tensors: CheckpointTensors, module: str) -> StoredMatrix:
        """Read the matrix, or the stack of matrices."""
