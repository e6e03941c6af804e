"""KV cache dtype and scales from a checkpoint: whether fp8 may be used, and one scale per layer for keys and values.

Values are divided by the scale before they are rounded to e4m3. Tools use different names:

    self_attn.k_scale, self_attn.v_scale                            compressed-tensors, AutoFP8
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale              ModelOpt
    self_attn.k_proj.output_scale, self_attn.v_proj.output_scale    Quark, compressed-tensors of 2024
    self_attn.kv_scale                                              AutoFP8 of 2024, for both
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from torch import Tensor

from common.engine.kv import SMALL_DTYPES
from common.errors import ModelError
from common.model_files import read_kv_scheme
from kernels import UNSCALED, KVScales

log = logging.getLogger(__name__)
NAMES: Final = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Names of a layer's scales, after `self_attn.`. The first pair found in the file is used."""
REMEDY: Final = "download the model again, or use --kv-cache-dtype native"


class ScaleSource(Protocol):
    """File or folder of tensors, under Hugging Face names."""

    @property
    def label(self) -> str: ...

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class KVCacheFormat:
    """Format of the KV cache: a dtype that `cache_dtype` accepts, and the scales of each layer (empty: all 1)."""

    dtype: str
    scales: tuple[KVScales, ...] = ()

    @classmethod
    def of(cls, setting: str, dtype: str, source: ScaleSource, config: Path | None, num_layers: int) -> KVCacheFormat:
        """Resolve `--kv-cache-dtype` for a model of `dtype`. `config`: path of its config.json, if any.

        Raises ModelError for invalid scales.
        """
        scheme = read_kv_scheme(config) if setting == "auto" and config is not None else None
        if scheme is not None and scheme.unsupported:
            log.info(
                "ignored the checkpoint's kv_cache_scheme (unsupported %s): KV cache dtype is %s",
                scheme.unsupported,
                dtype,
            )
        is_fp8 = setting == "fp8" or (scheme is not None and not scheme.unsupported)
        if not is_fp8:
            return cls(setting if setting in SMALL_DTYPES else dtype)
        required = scheme is not None and scheme.needs_scales
        return cls("fp8", read_kv_scales(source, num_layers, required=required))

    @property
    def in_words(self) -> str:
        """Description for the log."""
        if self.dtype != "fp8":
            return self.dtype
        if not self.scales:
            return "fp8 without scales (none in the checkpoint): keys and values beyond 448 are clipped"
        keys, values = zip(*self.scales, strict=True)
        return f"fp8 with the checkpoint's scales: keys {_between(keys)}, values {_between(values)}"

    def cut(self, num_layers: int) -> KVCacheFormat:
        """Adjust the scales to `num_layers` layers, the last of which may be a draft head's.

        Extra scales of the file are dropped. A head without scales is unscaled.
        """
        if not self.scales:
            return self
        return KVCacheFormat(self.dtype, (*self.scales, *(UNSCALED,) * (num_layers - len(self.scales)))[:num_layers])


def read_kv_scales(source: ScaleSource, num_layers: int, *, required: bool = False) -> tuple[KVScales, ...]:
    """Read the scales of the first `num_layers` layers, and of the next one if present; () if there are none.

    Raises ModelError if a scale is missing while others exist or `required` is set, is not a single number, or is not
    positive and finite.
    """
    pairs = [_names(source, layer) for layer in range(num_layers + 1)]
    found = [pair for pair in pairs if pair is not None]
    if not found and not required:
        return ()
    last = num_layers + (pairs[-1] is not None)
    return tuple(_read(source, pair, layer) for layer, pair in enumerate(pairs[:last]))


def _names(source: ScaleSource, layer: int) -> tuple[str, str] | None:
    """Return the names of a layer's scales, one of which may be missing; None if both are missing."""
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
        raise ModelError(f"{source.label}: missing tensor {name}, a scale of its fp8 KV cache: {REMEDY}")
    tensor = source.read(name)
    if tensor.numel() != 1 or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        wanted = "must be one float for all heads of a layer"
        raise ModelError(f"{source.label}: tensor {name} is {list(tensor.shape)} of {kind}, {wanted}: {REMEDY}")
    number = float(tensor.float())
    if not 0 < number < math.inf:
        raise ModelError(f"{source.label}: tensor {name} is {number:g}, a scale must be positive and finite: {REMEDY}")
    return number


def _between(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.3g} to {max(numbers):.3g}"
