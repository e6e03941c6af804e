"""Reads and dequantises tensors of GGUF files. Tensor data are memory-mapped. Does not load torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import ModelError
from common.model_files.gguf.metadata import GGUFTensor, read_gguf_head
from common.model_files.gguf.quantised import QuantisedBlocks, unpack_blocks

AGAIN: Final = "it is damaged or of another model, fetch it again"
VALUES_AT_ONCE: Final = 1 << 20  # values dequantised at a time, to limit temporaries


class GGUFFile:
    """GGUF file of a model. Raises ModelError if it is missing, damaged or truncated."""

    def __init__(self, path: Path, *more: Path) -> None:
        """`more` are the other parts of a split model. The first part has the metadata."""
        self.path = path
        self.head = read_gguf_head(path)
        self._tensors: dict[str, GGUFTensor] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for part in (path, *more):
            head = self.head if part == path else read_gguf_head(part)
            with part.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for tensor in head.tensors:
                _check(part, tensor, len(data))
                if tensor.name in self._tensors:
                    raise ModelError(f"{part}: tensor {tensor.name} occurs twice in the model's files: {AGAIN}")
                self._tensors[tensor.name], self._maps[tensor.name] = tensor, data

    @property
    def metadata(self) -> dict[str, Any]:
        return self.head.metadata

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape with rows first, as in numpy and torch. Raises ModelError if there is no such tensor."""
        return self._tensor(name).shape[::-1]

    def read(self, name: str, part: int | None = None) -> npt.NDArray[np.float32]:
        """Return a dequantised float32 copy of a tensor, or of one `part` of a stack.

        Raises ModelError if it is missing or of an unsupported type.
        """
        tensor, raw = self._tensor(name), self.raw(name, part)
        kind, columns, rows = GGMLQuantizationType(tensor.type), tensor.shape[0], raw.shape[0]
        out = np.empty((rows, columns), dtype=np.float32)
        step = max(1, VALUES_AT_ONCE // columns)
        try:
            for row in range(0, rows, step):
                out[row : row + step] = dequantize(raw[row : row + step], kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind.name}, which cannot be read: "
                "use a file quantised to Q8_0, Q4_K_M or F16"
            ) from error
        return out.reshape((tensor.shape if part is None else tensor.shape[:-1])[::-1])

    def quantised(self, name: str, part: int | None = None) -> QuantisedBlocks | None:
        """Return a matrix, or a `part` of a stack, as the file's integers, or None if no kernel multiplies these."""
        tensor = self._tensor(name)
        if len(tensor.shape) != (2 if part is None else 3):
            return None
        return unpack_blocks(self.raw(name, part), GGMLQuantizationType(tensor.type))

    def is_mxfp4(self, name: str) -> bool:
        return self._tensor(name).type == GGMLQuantizationType.MXFP4

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor has fewer than 16 bits per weight."""
        packed, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._tensor(name).type)]
        return size < 2 * packed

    @property
    def has_quantised(self) -> bool:
        """Whether any tensor has fewer than 16 bits per weight."""
        return any(map(self.is_quantised, self._tensors))

    def num_bytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes. Raises ModelError if there is no such tensor."""
        return _num_bytes(self._tensor(name))

    def kind(self, name: str) -> GGMLQuantizationType:
        """Return the tensor's storage type. Raises ModelError if there is no such tensor."""
        return GGMLQuantizationType(self._tensor(name).type)

    def raw(self, name: str, part: int | None = None) -> npt.NDArray[np.uint8]:
        """Return the bytes of each row. Raises ModelError if a stack has no such `part`."""
        tensor = self._tensor(name)
        raw = np.frombuffer(self._maps[name], dtype=np.uint8, count=_num_bytes(tensor), offset=tensor.offset)
        rows = raw.reshape(math.prod(tensor.shape[1:]), -1)
        if part is None:
            return rows
        if len(tensor.shape) < 2 or part >= tensor.shape[-1]:
            raise ModelError(f"{self.path}: tensor {name} is {list(tensor.shape)} and has no part {part}: {AGAIN}")
        each = math.prod(tensor.shape[1:-1])
        return rows[part * each : (part + 1) * each]

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {name}: {AGAIN}")
        return tensor


def _check(path: Path, tensor: GGUFTensor, size: int) -> None:
    """Raise ModelError if the tensor is invalid or exceeds a file of `size` bytes."""
    where = f"{path}: tensor {tensor.name}"
    if tensor.type not in GGMLQuantizationType._value2member_map_:
        raise ModelError(f"{where} has unknown type {tensor.type}: upgrade the gguf package, or use a Q8_0 file")
    packed = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)][0]
    if not tensor.shape or min(tensor.shape) < 1 or tensor.shape[0] % packed:
        raise ModelError(
            f"{where} has shape {list(tensor.shape)}, rows must be multiples of {packed}: fetch the model again"
        )
    end = tensor.offset + _num_bytes(tensor)
    if end > size:
        raise ModelError(f"{where} ends at byte {end:,}, the file has {size:,}: fetch the model again")


def _num_bytes(tensor: GGUFTensor) -> int:
    packed, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    return math.prod(tensor.shape) // packed * size
