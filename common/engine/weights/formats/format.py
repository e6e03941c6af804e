"""Interface of a weight format: how a checkpoint of safetensors describes and holds its quantised matrices.

A format is a file of this folder and an entry in `registry.FORMATS`. Each matrix's own tensors determine bits and
groups: the configuration names the format, and a format refuses configurations that it would read wrongly.
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
"""Of the scales of integers, as every tool writes them."""


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


class StoredMatrix(Protocol):
    """A matrix, or a stack of them, as a checkpoint holds it: small numbers with their scales."""

    def dense(self) -> Tensor:
        """The matrix in float32."""

    def held(self) -> QuantisedWeight | None:
        """The same numbers for kernels; None where no kernel multiplies them."""


class WeightFormat(ABC):
    """How the tensors of a module stand for its matrix. One instance reads one checkpoint.

    name      of the format, in messages
    methods   values of `quant_method` that mean it
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def configured(cls, reader: ConfigReader) -> Self:
        """The format as a `quantization_config` describes it. Raises ModelError where it would be read wrongly."""

    def module(self, name: str) -> str:
        """The module that a tensor of the file may be a part of."""
        return name.rpartition(".")[0] if "." in name else name

    @abstractmethod
    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        """Whether the module is quantised; otherwise the file has a plain tensor."""

    @abstractmethod
    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        """Whether a quantised module is read as integers, otherwise as floats."""

    @abstractmethod
    def check(self, tensors: CheckpointTensors, module: str) -> None:
        """Raise ModelError where a module's tensors do not fit together. Reads their heads only."""

    @abstractmethod
    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        """A quantised module by its largest part; scales are left out."""

    @abstractmethod
    def read(self, tensors: CheckpointTensors, module: str) -> StoredMatrix:
        """The matrix, or the stack of them."""


class ConfigReader:
    """One `quantization_config`. Every refusal names the file, the field, its value and what is allowed."""

    def __init__(self, fields: Any, path: Path, prefix: str) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: {prefix} is {shown(fields)}, expected an object: fetch the file again")
        self.fields: Mapping[str, Any] = fields
        self.path, self.prefix = path, prefix

    def of(self, name: str, fields: Any) -> ConfigReader:
        """A reader of an object within this one."""
        return ConfigReader(fields, self.path, f"{self.prefix}.{name}")

    def object_at(self, name: str) -> Mapping[str, Any]:
        """Read an object. Returns an empty one if the field is null or missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, ("an object",))
        return value or {}

    def block(self, name: str, value: Any) -> tuple[int, int]:
        """Two positive numbers: outputs and inputs that share a scale."""
        if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
            return int(value[0]), int(value[1])
        raise self.refusal(name, value, ("two positive whole numbers, such as [128, 128]",))

    def allow(self, name: str, allowed: Sequence[Any]) -> Any:
        """The value of a field. Raises ModelError for one that is not allowed; None allows its absence."""
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
    """What of a config.json describes the quantisation, and its name; "" where nothing does."""
    fields = read_json(path, required=True)
    text = fields.get("text_config")
    for holder in (fields, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if holder.get(name):
                return name, holder[name]
    return "", None
