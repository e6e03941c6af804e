"""Safetensors files of a Hugging Face folder as one source of named, memory-mapped tensors, quantised or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.weights.formats.format import WeightFormat
from common.engine.weights.formats.stored import StoredTensor, TensorHead, bytes_of, plain_tensor
from common.errors import ModelError
from kernels import QuantisedWeight

SUFFIX = ".weight"
WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.")
"""Prefixes of names in a checkpoint of a model without its head."""


class SafetensorsWeights:
    """A `WeightSource` over one or more files. Gemma's norm weights are stored as offsets from one."""

    norm_offset = 1.0

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise ModelError("no *.safetensors file in the model: use a folder with safetensors weights")
        self.label = str(paths[0].parent)
        self._files: dict[str, tuple[Any, str]] = {}
        holders: dict[str, str] = {}
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
                names = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} is missing, truncated or damaged ({error}): download it again") from error
            for name in names:
                plain, holder = self._plain(name), f"{name} of {path.name}"
                if plain in self._files:
                    raise ModelError(
                        f"{self.label}: duplicate tensor {plain}, as {holders[plain]} and as {holder}: "
                        "keep only the files of one model"
                    )
                self._files[plain], holders[plain] = (file, name), holder

    @staticmethod
    def _plain(name: str) -> str:
        """Remove the prefix under which multimodal checkpoints store the language model.

        Checkpoints of a model without its head, such as embedding models, omit the prefix `model.`, which is added.
        """
        if name.startswith(WITHOUT_HEAD):
            return f"model.{name}"
        for prefix in ("language_model.", "model.language_model."):
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
        return name

    def has(self, name: str) -> bool:
        return name in self._files

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        return None  # this class reads only float tensors

    def is_quantised(self, name: str) -> bool:
        return False

    @property
    def has_quantised(self) -> bool:
        return False

    def stored(self) -> list[StoredTensor]:
        return [plain_tensor(name, self.head(name)) for name in self._files]

    def stored_bytes(self, name: str) -> int:
        return bytes_of(self.head(name)) if name in self._files else 0

    def head(self, name: str) -> TensorHead:
        """Return the type and shape of a tensor without reading it."""
        file, stored = self._place(name)
        view = file.get_slice(stored)
        return TensorHead(view.get_dtype(), tuple(view.get_shape()))

    def read(self, name: str) -> Tensor:
        file, stored = self._place(name)
        try:
            tensor: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.label}: cannot read tensor {name} ({error}): download it again") from error
        return tensor

    def read_ranges(self, name: str, dim: int, ranges: Sequence[range]) -> Tensor:
        """Read and concatenate `ranges` of rows (`dim` 0), columns (1), ... of a tensor. Reads nothing else."""
        file, stored = self._place(name)
        try:
            view = file.get_slice(stored)
            before = (slice(None),) * dim
            parts: list[Tensor] = [view[*before, part.start : part.stop] for part in ranges]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.label}: cannot read tensor {name} ({error}): download it again") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _place(self, name: str) -> tuple[Any, str]:
        """Return the file that contains a tensor, and its name there."""
        if name not in self._files:
            raise ModelError(
                f"{self.label}: missing tensor {name} ({len(self._files)} tensors found): a weights file is missing "
                "or belongs to another model, download the model again"
            )
        return self._files[name]


class QuantisedSafetensors(SafetensorsWeights):
    """Source with quantised matrices. The file's tensors determine which, because configurations may ignore modules.

    Raises ModelError if the parts of a quantised matrix are inconsistent, without reading weights.
    """

    def __init__(self, paths: Sequence[Path], format: WeightFormat) -> None:
        super().__init__(paths)
        self.format = format
        self.tensors = StoredTensors(self)
        modules = {format.module(name) for name in self._files}
        self._quantised = {module for module in modules if format.holds(self.tensors, module)}
        if not self._quantised:
            raise ModelError(
                f"{self.label}: the configuration specifies {format.name} weights, but none of the {len(self._files)} "
                "tensors has this format: download the model again, or delete quantization_config from config.json if "
                "the weights were converted to floats"
            )
        for module in sorted(self._quantised):
            self.format.check(self.tensors, module)

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
            *(self.format.stored(self.tensors, module) for module in sorted(self._quantised)),
        ]

    def stored_bytes(self, name: str) -> int:
        if not self.is_quantised(name):
            return super().stored_bytes(name)
        return self.format.stored(self.tensors, name.removesuffix(SUFFIX)).num_bytes

    def _is_part(self, name: str) -> bool:
        """Return whether a tensor of the file is part of a quantised module."""
        return self.format.module(name) in self._quantised

    def read(self, name: str) -> Tensor:
        if not self.is_quantised(name):
            return super().read(name)
        return self.format.read(self.tensors, name.removesuffix(SUFFIX)).dense()

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        module = name.removesuffix(SUFFIX)
        if module not in self._quantised or not (floats or self.format.holds_integers(self.tensors, module)):
            return None
        return self.format.read(self.tensors, module).held()


class StoredTensors:
    """The tensors as stored in the files, without interpretation."""

    def __init__(self, files: SafetensorsWeights) -> None:
        self._files, self.label = files, files.label

    def has(self, name: str) -> bool:
        return SafetensorsWeights.has(self._files, name)

    def head(self, name: str) -> TensorHead:
        return self._files.head(name)

    def tensor(self, name: str) -> Tensor:
        return SafetensorsWeights.read(self._files, name)
