"""Reader of `adapter_model.safetensors`. Names and shapes are checked against the base model before use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from common.engine.adapters.peft_config import SUPPORTED, WEIGHTS_NAME, PeftConfig, read_peft_config
from common.engine.models import rotation_order
from common.errors import ModelError
from common.machine import read_regular_file
from common.model_files import ModelConfig
from kernels import LoraPart

Site = Literal["qkv", "output", "gate_up", "down"]
"""A LoRA site of a layer: see `LayerSites`."""
NAME = re.compile(
    r"base_model\.model\.(?P<module>(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<part>(?:self_attn|mlp)\.\w+))"
    r"\.lora_(?P<which>[AB])(?:\.\w+)?\.weight"
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_FLOAT = 4
"""Size of the largest supported float type, in bytes."""
DIGEST_BYTES = 16
"""Size of an adapter's digest, the same as of block hashes."""
MAX_NAME = 512
"""Maximum length of a tensor's name, in characters."""
HEADER_LENGTH_BYTES, MAX_HEADER_BYTES = 8, 8 << 20
"""A safetensors file starts with the length of its header, which has about 150 bytes per tensor."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Target of a module's change: outputs (first, count, rotated) of a site. `rotated`: q or k."""

    site: Site
    columns: int
    parts: tuple[tuple[int, int, bool], ...]

    @property
    def rows(self) -> int:
        return sum(count for _, count, _ in self.parts)


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the adapter: its two tensors and their position in the base model."""

    name: str
    layer: int
    place: _Place
    rank: int
    scale: float
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter that fits the base model. `digest` identifies weights, ranks and scales. `rank`: the largest."""

    digest: str
    rank: int
    layers: Mapping[int, Mapping[Site, tuple[LoraPart, ...]]]


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> AdapterWeights:
    """Read the adapter in `folder`, in PEFT's layout. Raises ModelError for an adapter that cannot be served.

    The file is untrusted. It is read completely into memory, because truncating a mapped file would kill the process,
    and only if it is not larger than the largest adapter of the base model.
    """
    peft, path = read_peft_config(folder, max_rank), folder / WEIGHTS_NAME
    places = [places_of(config, layer) for layer in range(config.num_layers)]
    try:
        data = read_regular_file(path, _max_bytes(places, max_rank))
        tensors = _tensors(data)
    except OSError as error:
        raise ModelError(f"{path} is missing, truncated or damaged: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is missing, truncated or damaged: {error}") from error
    modules = sorted(_checked(tensors, path, peft, places), key=lambda module: (module.layer, module.name))
    layers: dict[int, dict[Site, tuple[LoraPart, ...]]] = {}
    for module in modules:
        sites = layers.setdefault(module.layer, {})
        sites[module.place.site] = sites.get(module.place.site, ()) + tuple(_parts(module, config))
    return AdapterWeights(_digest(data, modules), max(module.rank for module in modules), layers)


def places_of(config: ModelConfig, layer: int) -> dict[str, _Place]:
    """Return the target of each supported module of a layer, by the end of its name."""
    dim, hidden, inner = config.head_dim, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    inputs = ((0, q, True), (q, kv, True), (q + kv, kv, False))
    places = {"self_attn.o_proj": _Place("output", q, ((0, hidden, False),))}
    if config.fused_qkv:
        places["self_attn.qkv_proj"] = _Place("qkv", hidden, inputs)
    else:
        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        places |= {name: _Place("qkv", hidden, (part,)) for name, part in zip(projections, inputs, strict=True)}
    if config.experts is not None and config.experts.layers[layer]:
        return places
    both = ((0, inner, False), (inner, inner, False))
    places["mlp.down_proj"] = _Place("down", inner, ((0, hidden, False),))
    if config.fused_gate_up:
        places["mlp.gate_up_proj"] = _Place("gate_up", hidden, both)
    else:
        names = ("mlp.gate_proj", "mlp.up_proj")
        places |= {name: _Place("gate_up", hidden, (part,)) for name, part in zip(names, both, strict=True)}
    return places


def _max_bytes(places: list[dict[str, _Place]], max_rank: int) -> int:
    """Return the size of the largest adapter file that fits the base model."""
    numbers = sum(place.columns + place.rows for of_layer in places for place in of_layer.values())
    return HEADER_LENGTH_BYTES + MAX_HEADER_BYTES + LARGEST_FLOAT * max_rank * numbers


def _tensors(data: bytearray) -> dict[str, Tensor]:
    """Parse a safetensors file into tensors by name. Raises ValueError for a damaged file."""
    try:
        return safetensors.torch.load(bytes(data))
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:  # some types do not exist in torch
        raise ValueError(str(error)) from error


def _checked(
    tensors: Mapping[str, Tensor], path: Path, peft: PeftConfig, places: list[dict[str, _Place]]
) -> Iterator[_Module]:
    """Yield the modules of the file after checking names, shapes and types."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    modules: dict[tuple[int, str], str] = {}
    for name in tensors:
        match = NAME.fullmatch(name) if len(name) <= MAX_NAME and name.isascii() else None
        if match is None:
            raise ModelError(f"{path}: tensor {name[:200]} is not supported: only LoRA weights of {SUPPORTED}")
        module, where = match["module"], (int(match["layer"]), match["part"])
        first = found.setdefault(where, {}).setdefault(match["which"], name)
        if modules.setdefault(where, module) != module or first != name:
            raise ModelError(f"{path}: tensor {name} is a duplicate, or belongs to the same module as {modules[where]}")
    if not found:
        raise ModelError(f"{path} has no tensors")
    for (layer, part), names in found.items():
        module = modules[layer, part]
        if layer >= len(places):
            raise ModelError(f"{path}: {module} is in layer {layer}, but the base model has {len(places)} layers")
        place = places[layer].get(part)
        if place is None:
            raise ModelError(f"{path}: {module} is not supported in this base model: only {SUPPORTED}, not of experts")
        if len(names) < 2:
            raise ModelError(f"{path}: {module} has no lora_A or no lora_B")
        rank, scale = peft.rank_and_scale(module)
        for which, shape in (("A", (rank, place.columns)), ("B", (place.rows, rank))):
            tensor = tensors[names[which]]
            if tensor.shape != shape:
                raise ModelError(
                    f"{path}: tensor {names[which]} has shape {list(tensor.shape)}, expected {list(shape)}"
                )
            if tensor.dtype not in FLOATS:
                raise ModelError(f"{path}: tensor {names[which]} has type {tensor.dtype}, must be 16- or 32-bit float")
        yield _Module(module, layer, place, rank, scale, tensors[names["A"]], tensors[names["B"]])


def _parts(module: _Module, config: ModelConfig) -> Iterator[LoraPart]:
    a, b = module.a.float(), module.b.float() * module.scale
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ModelError(f"adapter module {module.name} contains numbers that are not finite")
    order, at = rotation_order(config.layer_ropes[module.layer], config.head_dim), 0
    for first, count, rotated in module.place.parts:
        rows: Tensor = b[at : at + count]
        if rotated and order is not None:  # like the base model's rows
            heads = torch.arange(count // config.head_dim)[:, None] * config.head_dim
            rows = rows[(heads + order).flatten()]
        yield LoraPart(first, a, rows)
        at += count


def _digest(data: bytearray, modules: list[_Module]) -> str:
    """Return the digest of everything that determines the adapter's change."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for module in modules:
        digest.update(f"{module.name} {module.scale!r}\n".encode())
    digest.update(data)
    return digest.hexdigest()
