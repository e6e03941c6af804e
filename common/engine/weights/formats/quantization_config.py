"""How a checkpoint of safetensors holds its quantised matrices, read from config.json. No torch.

What a single matrix holds, bits and groups included, its own tensors say: the configuration
names the layout, and this refuses layouts that would be read wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from common.errors import ModelError, shown
from common.model_files import read_json


class CheckpointLayout(StrEnum):
    """The families of tensors that stand for one matrix."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED = "compressed-tensors"
    FLOAT8 = "fp8"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """`zero_shift`: what GPTQ's first layout takes from zero points. `block`: outputs and inputs of an fp8 scale."""

    layout: CheckpointLayout
    zero_shift: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How a checkpoint wants keys and values cached: in fp8 with a scale a layer for each, or by what is `unread`."""

    unread: str = ""


BITS: Final = (4, 8)
"""Of the integers that GPTQ and compressed-tensors write, and the kernels read."""
COMPRESSED_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
)
INT_STRATEGIES: Final = ("tensor", "channel", "group")
FLOAT_STRATEGIES: Final = ("tensor", "channel", "block")
KV_SCHEME: Final[Mapping[str, Sequence[Any]]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "dynamic": (False, None),
    "symmetric": (True, None),
}
"""What is read of a `kv_cache_scheme`."""


def read_quantization_config(path: Path) -> QuantizationConfig | None:
    """Of a config.json; None where weights are not quantised. ModelError where it cannot be read right."""
    name, fields = _fields_of(path)
    if not name or (isinstance(fields, dict) and _is_for_kv_alone(fields)):
        return None
    return _Reader(fields, path, name).read()


def read_kv_scheme(path: Path) -> KVScheme | None:
    """The `kv_cache_scheme` of a config.json; None where it has none. The word of old files of AutoFP8 is none."""
    _, fields = _fields_of(path)
    scheme = fields.get("kv_cache_scheme") if isinstance(fields, dict) else None
    if not isinstance(scheme, dict):
        return None
    others = (f"{name} {scheme.get(name)!r}" for name, read in KV_SCHEME.items() if scheme.get(name) not in read)
    return KVScheme(next(others, ""))


def _fields_of(path: Path) -> tuple[str, Any]:
    """What describes the quantisation, and its name; "" where nothing does."""
    fields = read_json(path, required=True)
    text = fields.get("text_config")
    for holder in (fields, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if holder.get(name):
                return name, holder[name]
    return "", None


def _is_for_kv_alone(fields: Mapping[str, Any]) -> bool:
    """Whether a configuration of compressed-tensors has a scheme of KV and no group of weights."""
    is_compressed = fields.get("quant_method") in (None, CheckpointLayout.COMPRESSED)
    return is_compressed and not fields.get("config_groups") and isinstance(fields.get("kv_cache_scheme"), dict)


class _Reader:
    """One `quantization_config`. Every refusal names the file, the field, its value and what is allowed."""

    def __init__(self, fields: Any, path: Path, prefix: str) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: {prefix} is {shown(fields)}, expected an object: fetch the file again")
        self.fields: Mapping[str, Any] = fields
        self.path, self.prefix = path, prefix

    def read(self) -> QuantizationConfig:
        method = self.fields.get("quant_method")
        if method is None and "config_groups" in self.fields:
            method = CheckpointLayout.COMPRESSED  # as early versions of compressed-tensors wrote it
        readers: dict[Any, Callable[[], QuantizationConfig]] = {
            "gptq": self._gptq,
            "awq": self._awq,
            "compressed-tensors": self._compressed,
            "fp8": self._float8,
            "fbgemm_fp8": self._float8,
            "mxfp4": lambda: QuantizationConfig(CheckpointLayout.MXFP4),
        }
        if not isinstance(method, str) or method not in readers:
            raise self._refusal("quant_method", method, tuple(readers))
        return readers[method]()

    def _gptq(self) -> QuantizationConfig:
        self._allow("bits", BITS)
        self._allow("pack_dtype", (None, "int32"))
        self._allow("is_marlin_format", (None, False))
        layout = self._allow("checkpoint_format", (None, "", "gptq", "gptq_v2"))
        return QuantizationConfig(CheckpointLayout.GPTQ, zero_shift=0 if layout == "gptq_v2" else 1)

    def _awq(self) -> QuantizationConfig:
        self._allow("bits" if "bits" in self.fields else "w_bit", (4,))
        self._allow("zero_point", (True,))
        self._allow("version", (None, "gemm", "GEMM"))
        return QuantizationConfig(CheckpointLayout.AWQ)

    def _float8(self) -> QuantizationConfig:
        self._allow("fmt", (None, "e4m3", "float8_e4m3fn"))
        block = self.fields.get("weight_block_size")
        if block is None:
            return QuantizationConfig(CheckpointLayout.FLOAT8)
        return QuantizationConfig(CheckpointLayout.FLOAT8, block=self._block("weight_block_size", block))

    def _compressed(self) -> QuantizationConfig:
        self._allow("format", (None, *COMPRESSED_FORMATS))
        sparsity = self._object("sparsity_config")
        if sparsity.get("format", "dense") != "dense":
            raise self._refusal("sparsity_config.format", sparsity["format"], ("dense",))
        if transforms := self._object("transform_config").get("config_groups"):
            named = list(transforms) if isinstance(transforms, dict) else transforms
            raise self._refusal("transform_config.config_groups", named, ("none",))
        groups = self.fields.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self._refusal("config_groups", groups, ("an object with a group of weights at least",))
        blocks = {self._compressed_group(f"config_groups.{name}", group) for name, group in groups.items()} - {None}
        if len(blocks) > 1:
            raise self._refusal("block_structure", sorted(blocks, key=str), ("one for all groups",))
        return QuantizationConfig(CheckpointLayout.COMPRESSED, block=blocks.pop() if blocks else None)

    def _compressed_group(self, name: str, group: Any) -> tuple[int, int] | None:
        """Checks a group of modules; returns the block of its scales, if they have one."""
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise self._refusal(f"{name}.weights", weights, ("an object",))
        inner = _Reader(weights, self.path, f"{self.prefix}.{name}.weights")
        if group.get("format") is not None:
            _Reader(group, self.path, f"{self.prefix}.{name}")._allow("format", COMPRESSED_FORMATS)
        kind = inner._allow("type", ("int", "float"))
        inner._allow("num_bits", BITS if kind == "int" else (8,))
        strategy = inner._allow("strategy", INT_STRATEGIES if kind == "int" else FLOAT_STRATEGIES)
        return inner._block("block_structure", weights.get("block_structure")) if strategy == "block" else None

    def _object(self, name: str) -> Mapping[str, Any]:
        """Read an object. Returns an empty one if the field is null or missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._refusal(name, value, ("an object",))
        return value or {}

    def _block(self, name: str, value: Any) -> tuple[int, int]:
        if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
            return int(value[0]), int(value[1])
        raise self._refusal(name, value, ("two positive whole numbers, such as [128, 128]",))

    def _allow(self, name: str, allowed: Sequence[Any]) -> Any:
        value = self.fields.get(name)
        if value not in allowed or (isinstance(value, bool) and not any(value is one for one in allowed)):
            raise self._refusal(name, value, allowed)
        return value

    def _refusal(self, name: str, value: Any, allowed: Sequence[Any]) -> ModelError:
        choices = ", ".join("absent" if one is None else str(one) for one in allowed)
        return ModelError(
            f"{self.path}: {self.prefix}.{name} is {shown(value)}, which is not supported (expected {choices}): "
            "use a checkpoint with float weights, or a GGUF file"
        )
