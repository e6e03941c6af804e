"""The model's files in each format: written once, what they hold by type, and what Diptych reads of them in a step."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from gguf import GGUFReader

from benchmarks.compare import checkpoints
from benchmarks.compare.formats.catalogue import Format
from benchmarks.compare.weights import Mixer, convert, folder_of, written_once
from benchmarks.cpu import matrices
from benchmarks.script import seconds_of
from common.engine.models.load import load_model
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from kernels.cpu.backend import native_backend
from kernels.cpu.large_pages import Arena

MEMORY_BYTES: Final = 2**28  # beyond any cache


def write(files: ModelFiles, formats: Iterable[Format], mix: Mixer | None) -> dict[str, Path]:
    """The file or folder of each format, written unless it exists. Raises PeerError and ModelError."""
    return {one.name: _written(files, one, mix) for one in formats}


def _written(files: ModelFiles, one: Format, mix: Mixer | None) -> Path:
    if one.source not in checkpoints.FORMATS:
        return convert(files, [one.source], mix)[one.source]
    path = folder_of(files) / one.name
    with written_once(path) as unfinished:
        if unfinished is not None:
            checkpoints.write_checkpoint(files, unfinished, one.source)
    return path


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it: for packed integers `num_elements` counts words."""

    name: str
    kind: str
    num_bytes: int
    num_elements: int

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a matrix of a layer, not to a norm, the embedding or the head."""
        return self.name.startswith(("blk.", "model.layers.")) and "norm" not in self.name


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a GGUF file, or of a folder's safetensors."""
    if path.is_file():
        for tensor in GGUFReader(path).tensors:
            yield StoredTensor(tensor.name, tensor.tensor_type.name, int(tensor.n_bytes), int(tensor.n_elements))
    for part in path.glob("*.safetensors"):
        with part.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(size))
        for name, about in head.items():
            if name != "__metadata__":
                first, end = about["data_offsets"]
                yield StoredTensor(name, about["dtype"], end - first, math.prod(about["shape"]))


def bytes_by_type(path: Path) -> dict[str, int]:
    """How many bytes of a GGUF file, or of a folder's safetensors, are tensors of which type; most first."""
    held: Counter[str] = Counter()
    for tensor in stored_tensors(path):
        held[tensor.kind] += tensor.num_bytes
    return dict(held.most_common())


def bits_a_weight(path: Path, original: ModelFiles) -> float:
    """Bits of the file, with scales, for each weight of the layers' matrices. `original` packs no integers in words."""
    source = original.weights[0] if original.format == "gguf" else original.weights[0].parent
    num_weights = sum(tensor.num_elements for tensor in stored_tensors(source) if tensor.in_layer)
    return 8 * sum(tensor.num_bytes for tensor in stored_tensors(path) if tensor.in_layer) / num_weights


def bytes_of_a_step(path: Path, quantization: str) -> int:
    """Bytes of the matrices that a decode step reads, as native kernels hold them; 0 if these do not hold all."""
    with torch.inference_mode():
        model = load_model(resolve_model(str(path), progress=False), dtype="bfloat16", quantization=quantization)
    held = [matrix.native for matrix in matrices(model)]
    return 0 if None in held else sum(weight.num_bytes for weight in held if weight is not None)


def reading_rate() -> float:
    """Bytes a second at which this machine reads memory; 0 without native kernels."""
    native = native_backend()
    if native is None:
        return 0.0
    memory = Arena().take(MEMORY_BYTES).fill_(1)
    return MEMORY_BYTES / min(seconds_of(lambda: native.read(memory), 24))
