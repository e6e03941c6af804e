"""What a checkpoint says of the cache of its keys and values: that it may be of fp8, and one scale a layer for each.

A scale is what numbers are divided by before they are rounded to e4m3. Every tool names it otherwise:

    self_attn.k_scale, self_attn.v_scale                            compressed-tensors, AutoFP8
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale              ModelOpt
    self_attn.k_proj.output_scale, self_attn.v_proj.output_scale    Quark, compressed-tensors of 2024
    self_attn.kv_scale                                              AutoFP8 of 2024: of both
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from common.engine.kv import SMALL_DTYPES
from common.engine.weights.formats.format import quantization_fields
from common.errors import ModelError
from kernels import UNSCALED, KVScales

log = logging.getLogger(__name__)
NAMES: Final = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Of a layer's scales, behind `self_attn.`: the first pair of which a file has any is read."""
REMEDY: Final = "fetch the model again, or give --kv-cache-dtype native"

KV_SCHEME: Final[Mapping[str, Sequence[Any]]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "dynamic": (False, None),
    "symmetric": (True, None),
}
"""What is read of a `kv_cache_scheme`."""


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How a checkpoint wants keys and values cached: in fp8 with a scale a layer for each, or by what is `unread`."""

    unread: str = ""


class ScaleSource(Protocol):
    """A file or folder of tensors, by Hugging Face's names."""

    @property
    def label(self) -> str: ...

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class KVForm:
    """How a worker's cache holds keys and values: in a type that `cache_dtype` takes, divided by the scales of each
    layer; none: as they are."""

    dtype: str
    scales: tuple[KVScales, ...] = ()

    @classmethod
    def of(cls, setting: str, dtype: str, source: ScaleSource, config: Path | None, num_layers: int) -> KVForm:
        """What `--kv-cache-dtype` means for a model of `dtype` whose file `config` is config.json, if it has one.

        Raises ModelError for scales that cannot be used.
        """
        scheme = read_kv_scheme(config) if setting == "auto" and config is not None else None
        if scheme is not None and scheme.unread:
            log.info("the checkpoint's kv_cache_scheme is not used, for its %s: KV is in %s", scheme.unread, dtype)
        is_fp8 = setting == "fp8" or (scheme is not None and not scheme.unread)
        if not is_fp8:
            return cls(setting if setting in SMALL_DTYPES else dtype)
        return cls("fp8", read_kv_scales(source, num_layers, required=setting == "auto"))

    @property
    def in_words(self) -> str:
        """For the log."""
        if self.dtype != "fp8":
            return self.dtype
        if not self.scales:
            return "fp8 without scales, which the checkpoint lacks: keys and values beyond 448 are cut"
        keys, values = zip(*self.scales, strict=True)
        return f"fp8 with the checkpoint's scales, of keys {_between(keys)}, of values {_between(values)}"

    def cut(self, num_layers: int) -> KVForm:
        """Of a model of so many layers, of which the last may be a draft head's: the file may have more scales than
        those, or none for the head, whose keys and values then stay as they are."""
        if not self.scales:
            return self
        return KVForm(self.dtype, (*self.scales, *(UNSCALED,) * (num_layers - len(self.scales)))[:num_layers])


def read_kv_scheme(path: Path) -> KVScheme | None:
    """The `kv_cache_scheme` of a config.json; None where it has none. The word of old files of AutoFP8 is none."""
    _, fields = quantization_fields(path)
    scheme = fields.get("kv_cache_scheme") if isinstance(fields, dict) else None
    if not isinstance(scheme, dict):
        return None
    others = (f"{name} {scheme.get(name)!r}" for name, read in KV_SCHEME.items() if scheme.get(name) not in read)
    return KVScheme(next(others, ""))


def read_kv_scales(source: ScaleSource, num_layers: int, *, required: bool = False) -> tuple[KVScales, ...]:
    """Of the first `num_layers` layers, and of the one behind them if the file has any for it; () where it has none.

    ModelError for a scale that is missing beside others, or `required`; is not one number; or is none to divide by.
    """
    pairs = [_names(source, layer) for layer in range(num_layers + 1)]
    found = [pair for pair in pairs if pair is not None]
    if not found and not required:
        return ()
    last = num_layers + (pairs[-1] is not None)
    return tuple(_read(source, pair, layer) for layer, pair in enumerate(pairs[:last]))


def _names(source: ScaleSource, layer: int) -> tuple[str, str] | None:
    """Which tensors hold a layer's scales, one of which may be missing; None where both are."""
    for key, value in NAMES:
        pair = (f"model.layers.{layer}.self_attn.{key}", f"model.layers.{layer}.self_attn.{value}")
        if any(map(source.has, pair)):
            return pair
    return None


def _read(source: ScaleSource, names: tuple[str, str] | None, layer: int) -> KVScales:
    key, value = names or (f"model.layers.{layer}.self_attn.{name}" for name in NAMES[0])
    return KVScales(_number(source, key), _number(source, value))


def _number(source: ScaleSource, name: str) -> float:
    if not source.has(name):
        raise ModelError(f"{source.label}: no tensor {name}, a scale of its KV cache in fp8: {REMEDY}")
    tensor = source.read(name)
    if tensor.numel() != 1 or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        wanted = "one float for all heads of a layer is read"
        raise ModelError(f"{source.label}: tensor {name} is {list(tensor.shape)} of {kind}, {wanted}: {REMEDY}")
    number = float(tensor.float())
    if not 0 < number < math.inf:
        raise ModelError(
            f"{source.label}: tensor {name} is {number:g}, numbers are divided by one that is above 0 and finite: "
            f"{REMEDY}"
        )
    return number


def _between(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.3g} to {max(numbers):.3g}"
