"""Interface of a weight format: how a safetensors checkpoint describes and stores its quantised matrices.

A format is a file in this folder and an entry in `registry.FORMATS`. The configuration names the format, and the
tensors of each matrix determine bits and groups. A format rejects configurations that it would misinterpret.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

from torch import Tensor

from common.engine.weights.formats.stored import StoredTensor, TensorHead
from common.errors import ModelError, shown
from common.model_files import read_json
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

    name      name in messages
    methods   values of `quant_method` for this format
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def configured(cls, reader: ConfigReader) -> Self:
        """Create the format described by a `quantization_config`. Raises ModelError if it is not supported."""

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


class ConfigReader:
    """Reader of a `quantization_config`. Errors name the file, field, value and allowed values."""

    def __init__(self, fields: Any, path: Path, prefix: str) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: {prefix} is {shown(fields)}, must be an object: download the file again")
        self.fields: Mapping[str, Any] = fields
        self.path, self.prefix = path, prefix

    def of(self, name: str, fields: Any) -> ConfigReader:
        """Return a reader of a nested object."""
        return ConfigReader(fields, self.path, f"{self.prefix}.{name}")

    def object_at(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if the field is null or missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, ("an object",))
        return value or {}

    def block(self, name: str, value: Any) -> tuple[int, int]:
        """Return the number of outputs and inputs that share a scale."""
        if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
            return int(value[0]), int(value[1])
        raise self.refusal(name, value, ("two positive integers, such as [128, 128]",))

    def allow(self, name: str, allowed: Sequence[Any]) -> Any:
        """Return the value of a field. Raises ModelError if it is not in `allowed`. None allows a missing field."""
        value = self.fields.get(name)
        if value not in allowed or (isinstance(value, bool) and not any(value is one for one in allowed)):
            raise self.refusal(name, value, allowed)
        return value

    def refusal(self, name: str, value: Any, allowed: Sequence[Any]) -> ModelError:
        choices = ", ".join("absent" if one is None else str(one) for one in allowed)
        return ModelError(
            f"{self.path}: {self.prefix}.{name} is {shown(value)}, which is not supported (expected {choices}): "
            "use a checkpoint with float weights, or a GGUF file"
        )


def quantization_fields(path: Path) -> tuple[str, Any]:
    """Return the name and value of a config.json's quantization section; ("", None) if there is none."""
    fields = read_json(path, required=True)
    text = fields.get("text_config")
    for holder in (fields, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if holder.get(name):
                return name, holder[name]
    return "", None
