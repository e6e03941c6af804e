"""Facts about a model for people: architecture, parameters, quantisation, licence and memory. Does not load torch."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_files.config import ModelConfig, from_hf
from common.model_files.files import ModelFiles
from common.model_files.gguf.metadata import GGUFHead, read_gguf_head, rope_factors
from common.model_files.gguf_config import TensorFacts, from_gguf
from common.model_files.json_file import read_json, read_text
from common.model_files.weight_paths import weight_files
from common.model_files.weight_scheme import read_weight_scheme

PACKED = ("qweight", "weight_packed", "_blocks")
"""Ends of names of tensors whose elements store several weights."""
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True)
class ModelSummary:
    """Facts about a model. Unknown texts are "", unknown numbers 0.

    `quantisation` is the type of most weights, such as "Q4_K_M" or "bfloat16". `kv_numbers` are stored per token of
    the context, for at most `window` tokens (0: all).
    """

    architecture: str
    num_parameters: int
    quantisation: str
    licence: str
    num_bytes: int
    kv_numbers: int
    window: int


def summary_of(files: ModelFiles) -> ModelSummary:
    """Read the facts from the headers of a model's files. Raises ModelError if they are damaged."""
    return _of_gguf(files.weights) if files.format == "gguf" else _of_folder(files)


def _of_gguf(parts: Sequence[Path]) -> ModelSummary:
    from gguf.constants import GGMLQuantizationType, LlamaFileType  # takes time to import

    heads = [read_gguf_head(part) for part in parts]
    counts: Counter[int] = Counter()
    for tensor in (tensor for head in heads for tensor in head.tensors):
        counts[tensor.type] += math.prod(tensor.shape)
    try:  # files of older tools have no or a wrong type
        kind = LlamaFileType(heads[0].metadata["general.file_type"]).name.removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        kind = GGMLQuantizationType(counts.most_common(1)[0][0]).name if counts else ""
    config = _gguf_config(heads, parts[0])
    return ModelSummary(
        architecture=heads[0].architecture,
        num_parameters=counts.total(),
        quantisation=kind,
        licence=str(heads[0].metadata.get("general.license", "")),
        num_bytes=_size(parts),
        kv_numbers=config.kv_numbers if config is not None else 0,
        window=config.window if config is not None else 0,
    )


def _gguf_config(heads: Sequence[GGUFHead], path: Path) -> ModelConfig | None:
    metadata = heads[0].metadata
    names = {tensor.name for head in heads for tensor in head.tensors}
    try:
        facts = TensorFacts.of(names, len(metadata["tokenizer.ggml.tokens"]), rope_factors(path, heads[0]))
        return from_gguf(metadata, facts, path)
    except (ModelError, KeyError, TypeError):
        return None


def _of_folder(files: ModelFiles) -> ModelSummary:
    assert files.config is not None
    folder, fields = files.config.parent, read_json(files.config, required=True)
    config: ModelConfig | None
    try:
        config, scheme = from_hf(files.config), read_weight_scheme(files.config)
    except ModelError:  # a model that only another engine supports
        config = scheme = None
    try:
        weights = files.weights or weight_files(folder)
    except ModelError:  # a router needs no weights
        weights = ()
    section = fields.get("quantization_config")
    bits = section.get("bits") if isinstance(section, dict) else None
    bits = bits if isinstance(bits, int) and 0 < bits <= 8 else 4
    kinds: Counter[str] = Counter()
    num_parameters = 0
    for name, kind, count in (tensor for path in weights for tensor in _tensors(path)):
        kinds[kind] += count
        if scheme is None or name.endswith((".weight", ".bias")):
            num_parameters += count
        elif name.endswith(PACKED):
            num_parameters += count * (32 if kind == "I32" else 8) // bits
    dtype = kinds.most_common(1)[0][0] if kinds else str(fields.get("dtype") or fields.get("torch_dtype") or "")
    return ModelSummary(
        architecture=str(fields.get("model_type", "")),
        num_parameters=num_parameters,
        quantisation=str(scheme.format) if scheme is not None else dtype,
        licence=_licence(folder),
        num_bytes=_size(weights),
        kv_numbers=config.kv_numbers if config is not None else 0,
        window=config.window if config is not None else 0,
    )


def _tensors(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and number of elements of the tensors of a safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head: dict[str, Any] = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        head.pop("__metadata__", None)
        yield from [(name, str(about["dtype"]), math.prod(about["shape"])) for name, about in head.items()]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file ({error}): fetch it again") from error


def _licence(folder: Path) -> str:
    """Return the licence that README.md declares, or else the first line of a licence file."""
    head = (read_text(folder / "README.md") or "").split("---\n")
    declared = head[1].splitlines() if len(head) > 2 and not head[0].strip() else []
    for line in declared:
        name, _, value = line.partition(":")
        if name == "license" and value.strip():
            return value.strip()
    texts = (read_text(folder / name) for name in LICENCE_FILES)
    return next((text.strip().splitlines()[0].strip() for text in texts if text and text.strip()), "")


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
