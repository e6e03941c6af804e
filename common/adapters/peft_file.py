"""An adapter's `adapter_model.safetensors`: names and shapes are checked against the base before a tensor is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.adapters.peft_config import SUPPORTED, WEIGHTS_NAME, PeftConfig, read_peft_config
from common.errors import ModelError
from common.model.rope import rotation_order
from common.model_files.config import ModelConfig
from kernels import LoraPart

Site = Literal["qkv", "output", "gate_up", "down"]
"""A matrix of a layer: see `LayerSites`."""
NAME = re.compile(
    r"base_model\.model\.(?P<module>(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<part>(?:self_attn|mlp)\.\w+))"
    r"\.lora_(?P<which>[AB])(?:\.\w+)?\.weight"
)
FLOATS = ("F32", "F16", "BF16")
DIGEST_BYTES, READ_BYTES = 16, 1 << 20
"""Of the digest that tells adapters apart, as of block hashes; what is read at a time to make it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module's change goes: outputs (first, count) of a site, each a part of their own. `rotated`: q or k."""

    site: Site
    columns: int
    parts: tuple[tuple[int, int, bool], ...]

    @property
    def rows(self) -> int:
        return sum(count for _, count, _ in self.parts)


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the adapter: the names of its tensors, and where they go."""

    name: str
    layer: int
    place: _Place
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter that fits the base model. Equal `digest`: the same weights, ranks and scales. `rank`: the largest."""

    digest: str
    rank: int
    layers: Mapping[int, Mapping[Site, tuple[LoraPart, ...]]]


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> AdapterWeights:
    """Reads the adapter in `folder`, in PEFT's layout. ModelError, with the reason, for one that cannot be served."""
    peft, path = read_peft_config(folder, max_rank), folder / WEIGHTS_NAME
    try:
        with safe_open(str(path), framework="pt") as file:
            modules = sorted(_checked(file, path, peft, config), key=lambda module: (module.layer, module.name))
            digest = _digest(path, peft, modules)
            layers: dict[int, dict[Site, tuple[LoraPart, ...]]] = {}
            for module in modules:
                sites = layers.setdefault(module.layer, {})
                more = tuple(_parts(file, module, peft, config))
                sites[module.place.site] = sites.get(module.place.site, ()) + more
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is missing, truncated or damaged: {error}") from error
    return AdapterWeights(digest, max(peft.rank_of(module.name) for module in modules), layers)


def places_of(config: ModelConfig, layer: int) -> dict[str, _Place]:
    """By the end of its name, where the change of each supported module of a layer goes."""
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


def _checked(file: Any, path: Path, peft: PeftConfig, config: ModelConfig) -> Iterator[_Module]:
    """The modules of the file, whose names, shapes and types fit."""
    found: dict[tuple[str, int, str], dict[str, str]] = {}
    for name in list(file.keys()):
        match = NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{path}: tensor {name[:200]} is not supported: only LoRA weights of {SUPPORTED}")
        found.setdefault((match["module"], int(match["layer"]), match["part"]), {})[match["which"]] = name
    if not found:
        raise ModelError(f"{path} has no tensors")
    for (module, layer, part), names in found.items():
        if layer >= config.num_layers:
            raise ModelError(f"{path}: {module} is in layer {layer}, the base model has {config.num_layers}")
        place = places_of(config, layer).get(part)
        if place is None:
            raise ModelError(f"{path}: {module} is not supported in this base model: only {SUPPORTED}, not of experts")
        if len(names) < 2:
            raise ModelError(f"{path}: {module} lacks its lora_A or its lora_B")
        rank = peft.rank_of(module)
        for which, shape in (("A", (rank, place.columns)), ("B", (place.rows, rank))):
            view = file.get_slice(names[which])
            if tuple(view.get_shape()) != shape:
                raise ModelError(
                    f"{path}: tensor {names[which]} is {list(view.get_shape())}, base model and rank want {list(shape)}"
                )
            if view.get_dtype() not in FLOATS:
                raise ModelError(
                    f"{path}: tensor {names[which]} has dtype {view.get_dtype()}: only {', '.join(FLOATS)}"
                )
        yield _Module(module, layer, place, names["A"], names["B"])


def _parts(file: Any, module: _Module, peft: PeftConfig, config: ModelConfig) -> Iterator[LoraPart]:
    a, b = file.get_tensor(module.a).float(), file.get_tensor(module.b).float() * peft.scale_of(module.name)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ModelError(f"{module.name} of the adapter holds numbers that are not finite")
    order, at = rotation_order(config.layer_ropes[module.layer], config.head_dim), 0
    for first, count, rotated in module.place.parts:
        rows: Tensor = b[at : at + count]
        if rotated and order is not None:  # as the base model's own rows
            heads = torch.arange(count // config.head_dim)[:, None] * config.head_dim
            rows = rows[(heads + order).flatten()]
        yield LoraPart(first, a, rows)
        at += count


def _digest(path: Path, peft: PeftConfig, modules: list[_Module]) -> str:
    """Of all that the adapter's change depends on."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for module in modules:
        digest.update(f"{module.name} {peft.scale_of(module.name)!r}\n".encode())
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
