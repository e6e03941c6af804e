"""A `WeightSource` over safetensors files that hold quantised matrices: integers as they are, or floats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from common.engine.weights.formats.awq import AWQLayout
from common.engine.weights.formats.compressed_tensors import CompressedLayout
from common.engine.weights.formats.float8 import Float8Layout, ScaledFloats
from common.engine.weights.formats.gptq import GPTQLayout
from common.engine.weights.formats.grouped_integers import GroupedIntegers
from common.engine.weights.formats.mxfp4 import MicroscaledFloats, MXFP4Layout
from common.engine.weights.formats.quantization_config import CheckpointLayout, QuantizationConfig
from common.engine.weights.formats.stored import StoredTensor, module_tensor, plain_tensor
from common.engine.weights.formats.tensors import CheckpointTensors, TensorHead
from common.engine.weights.safetensors_weights import SafetensorsWeights
from common.errors import ModelError
from kernels import QuantisedWeight

SUFFIX = ".weight"


class ModuleLayout(Protocol):
    """How the tensors of a module stand for its matrix."""

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        """Whether they do; else the file has a plain tensor."""

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        """Of a module that is held so: whether it is read as integers, else as floats."""

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        """ModelError where they do not fit together. Reads their heads only."""

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers | ScaledFloats | MicroscaledFloats:
        """The matrix, or the stack of them: small numbers with their scales."""


def layout_of(config: QuantizationConfig) -> ModuleLayout:
    match config.layout:
        case CheckpointLayout.GPTQ:
            return GPTQLayout(config.zero_shift)
        case CheckpointLayout.AWQ:
            return AWQLayout()
        case CheckpointLayout.COMPRESSED:
            return CompressedLayout(config.block)
        case CheckpointLayout.FLOAT8:
            return Float8Layout(config.block)
        case CheckpointLayout.MXFP4:
            return MXFP4Layout()


class QuantisedSafetensors(SafetensorsWeights):
    """What the file holds decides, matrix by matrix: modules that a configuration ignores are plain tensors in it.

    ModelError at once where the parts of a quantised matrix do not fit together: no weight is read for that.
    """

    def __init__(self, paths: Sequence[Path], config: QuantizationConfig) -> None:
        super().__init__(paths)
        self.layout = layout_of(config)
        self.tensors = StoredTensors(self)
        stems = (name.rpartition(".")[0] if "." in name else name for name in self._files)
        names = (name.removesuffix("_blocks") for name in self._files)
        self._quantised = {one for one in (*stems, *names) if self.layout.holds(self.tensors, one)}
        if not self._quantised:
            raise ModelError(
                f"{self.label}: its configuration names {config.layout} weights, and none of its {len(self._files)} "
                "tensors is one: fetch the model again"
            )
        for module in sorted(self._quantised):
            self.layout.check(self.tensors, module)

    def has(self, name: str) -> bool:
        return super().has(name) or self.is_quantised(name)

    def is_quantised(self, name: str) -> bool:
        return name.removesuffix(SUFFIX) in self._quantised

    @property
    def has_quantised(self) -> bool:
        return True

    def stored(self) -> list[StoredTensor]:
        plain = [name for name in self._files if not self._is_part(name)]
        return [
            *(plain_tensor(name, self.head(name)) for name in plain),
            *(module_tensor(self.tensors, module) for module in sorted(self._quantised)),
        ]

    def stored_bytes(self, name: str) -> int:
        if not self.is_quantised(name):
            return super().stored_bytes(name)
        return module_tensor(self.tensors, name.removesuffix(SUFFIX)).num_bytes

    def _is_part(self, name: str) -> bool:
        """Whether a tensor of the file belongs to a quantised module."""
        return name.rpartition(".")[0] in self._quantised or name.removesuffix("_blocks") in self._quantised

    def read(self, name: str) -> Tensor:
        if not self.is_quantised(name):
            return super().read(name)
        return self.layout.read(self.tensors, name.removesuffix(SUFFIX)).dense()

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        module = name.removesuffix(SUFFIX)
        if module not in self._quantised or not (floats or self.layout.holds_integers(self.tensors, module)):
            return None
        return self.layout.read(self.tensors, module).held()


class StoredTensors:
    """The tensors as the files hold them, whatever they stand for."""

    def __init__(self, files: SafetensorsWeights) -> None:
        self._files, self.label = files, files.label

    def has(self, name: str) -> bool:
        return SafetensorsWeights.has(self._files, name)

    def head(self, name: str) -> TensorHead:
        return self._files.head(name)

    def tensor(self, name: str) -> Tensor:
        return SafetensorsWeights.read(self._files, name)
