"""Format of a checkpoint's weights and KV cache, read from its quantisation configuration. Does not load torch.

Routers and workers call the same functions, so that both refuse an unsupported checkpoint before its weights are read.
Lists of modules that stay in floats (`ignore`, `ignored_layers`, `modules_to_not_convert`, `exclude_modules`) are not
read: the tensors of the file determine which matrices are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from common.errors import ModelError, shown
from common.model_files.architecture import FieldReader
from common.model_files.json_file import read_json

FormatName = Literal["gptq", "awq", "compressed-tensors", "fp8", "mxfp4"]
SIDECAR: Final = "hf_quant_config.json"
"""File of ModelOpt. Checkpoints until 2025 have no `quantization_config`, only this file."""
HOLDERS: Final = ("quantization_config", "compression_config", "quantization")
"""Fields of config.json: the usual one, that of early compressed-tensors, and that of MLX."""
INTEGER_BITS: Final = (4, 8)
"""Bits per integer in GPTQ and compressed-tensors that the kernels support."""
AWQ_BITS: Final = 4
"""Bits per integer of AWQ. AutoAWQ writes no others."""
COMPRESSED_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
)
INT_STRATEGIES: Final = ("tensor", "channel", "group")
FLOAT_STRATEGIES: Final = ("tensor", "channel", "block")
MODELOPT_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
KV_SCHEME: Final[Mapping[str, Sequence[Any]]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "dynamic": (False, None),
    "symmetric": (True, None),
}
"""Supported values of a `kv_cache_scheme`."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Format of a checkpoint's quantised matrices. Bits and groups follow from the tensors.

    `zero_shift` is added to the stored zero points of GPTQ. `block`: outputs and inputs that share a scale of fp8
    numbers; None for one scale per output or tensor.
    """

    format: FormatName
    zero_shift: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KVScheme:
    """KV cache format that a checkpoint requests: fp8, or one that is not supported (`unsupported`).

    With `needs_scales`, the file must have a scale per layer. ModelOpt omits scales of 1.
    """

    unsupported: str = ""
    needs_scales: bool = True


class ConfigReader:
    """Reader of a `quantization_config`. Errors name the file, the field, its value and the allowed values."""

    def __init__(self, fields: Any, path: Path, prefix: str) -> None:
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: {prefix} is {shown(fields)}, must be an object: download the file again")
        self.fields: Mapping[str, Any] = fields
        self.path, self.prefix = path, prefix

    @property
    def method(self) -> Any:
        """The `quant_method`, inferred from other fields where versions of compressed-tensors and ModelOpt omit it."""
        if self.fields.get("quant_method") is not None:
            return self.fields["quant_method"]
        if "quant_algo" in self.fields:
            return "modelopt"
        return "compressed-tensors" if {"config_groups", "kv_cache_scheme"} & self.fields.keys() else None

    def of(self, name: str, fields: Any) -> ConfigReader:
        """Return a reader of a nested object."""
        return ConfigReader(fields, self.path, f"{self.prefix}.{name}")

    def object_at(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if the field is null or missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, ("an object",))
        return value or {}

    def block(self, name: str, value: Any) -> tuple[int, int]:
        """Return the number of outputs and inputs that share a scale."""
        if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
            return int(value[0]), int(value[1])
        raise self.refusal(name, value, ("two positive integers, such as [128, 128]",))

    def allow(self, name: str, allowed: Sequence[Any]) -> Any:
        """Return the value of a field. Raises ModelError if it is not in `allowed`. None allows a missing field."""
        value = self.fields.get(name)
        if value not in allowed or (isinstance(value, bool) and not any(value is one for one in allowed)):
            raise self.refusal(name, value, allowed)
        return value

    def refusal(self, name: str, value: Any, allowed: Sequence[Any]) -> ModelError:
        choices = ", ".join("absent" if one is None else str(one) for one in allowed)
        return ModelError(
            f"{self.path}: {self.prefix}.{name} is {shown(value)}, which is not supported (expected {choices}): "
            "use a checkpoint with float weights, or a GGUF file"
        )


def read_weight_scheme(path: Path) -> WeightScheme | None:
    """Return the format of a config.json's weights; None if they are not quantised. Raises ModelError."""
    reader = _reader(path)
    if reader is None or _has_only_kv_scheme(reader):
        return None
    if reader.method not in list(METHODS):
        raise reader.refusal("quant_method", reader.method, tuple(METHODS))
    return METHODS[reader.method](reader)


def read_kv_scheme(path: Path) -> KVScheme | None:
    """Return the KV cache format that a config.json requests, or None. The string of old AutoFP8 files is ignored.

    Raises ModelError if the configuration is damaged.
    """
    if (reader := _reader(path)) is None:
        return None
    scheme = reader.fields.get("kv_cache_scheme")
    by_modelopt = reader.method == "modelopt"
    if by_modelopt and not isinstance(scheme, dict):
        algorithm = reader.fields.get("kv_cache_quant_algo") or scheme
        if not algorithm:
            return None
        return KVScheme("" if str(algorithm).upper() == "FP8" else f"algorithm {shown(algorithm)}", needs_scales=False)
    if not isinstance(scheme, dict):
        return None
    others = (f"{name} {scheme.get(name)!r}" for name, read in KV_SCHEME.items() if scheme.get(name) not in read)
    return KVScheme(next(others, ""), needs_scales=not by_modelopt)


def _reader(path: Path) -> ConfigReader | None:
    """Return the quantisation section of a config.json or of ModelOpt's file next to it; None if there is none."""
    sidecar = path.with_name(SIDECAR)
    own = FieldReader(read_json(sidecar), sidecar).mapping("quantization")
    modelopt = ConfigReader({**own, "quant_method": "modelopt"}, sidecar, "quantization") if own else None
    if modelopt is not None and own.get("quant_algo") is not None:
        return modelopt
    fields = read_json(path, required=True)
    text = fields.get("text_config")
    for holder in (fields, text if isinstance(text, dict) else {}):
        for name in HOLDERS:
            if holder.get(name):
                return ConfigReader(holder[name], path, name)
    return modelopt


def _has_only_kv_scheme(reader: ConfigReader) -> bool:
    """Whether a configuration has a KV scheme but no quantised weights."""
    fields = reader.fields
    if reader.method == "modelopt":
        return fields.get("quant_algo") is None
    kv_only = not fields.get("config_groups") and isinstance(fields.get("kv_cache_scheme"), dict)
    return reader.method == "compressed-tensors" and kv_only


def _gptq(reader: ConfigReader) -> WeightScheme:
    """Read the format of AutoGPTQ and GPTQModel. Its first layout stores zero points minus one, `gptq_v2` unchanged."""
    reader.allow("bits", INTEGER_BITS)
    reader.allow("pack_dtype", (None, "int32"))
    reader.allow("is_marlin_format", (None, False))
    layouts = {reader.allow(name, (None, "", "gptq", "gptq_v2")) for name in ("checkpoint_format", "format")}
    return WeightScheme("gptq", zero_shift=0 if "gptq_v2" in layouts else 1)


def _awq(reader: ConfigReader) -> WeightScheme:
    """Read the format of AutoAWQ. transformers 5 calls its `version` `format`."""
    reader.allow("bits" if "bits" in reader.fields else "w_bit", (AWQ_BITS,))
    reader.allow("zero_point", (True,))
    for name in ("version", "format"):
        reader.allow(name, (None, "gemm", "GEMM"))
    return WeightScheme("awq")


def _fp8(reader: ConfigReader) -> WeightScheme:
    reader.allow("fmt", (None, "e4m3", "float8_e4m3fn"))
    block = reader.fields.get("weight_block_size")
    return WeightScheme("fp8", block=None if block is None else reader.block("weight_block_size", block))


def _modelopt(reader: ConfigReader) -> WeightScheme:
    """Read the format of ModelOpt, whose fp8 matrices are stored as in `fp8`."""
    algorithm = reader.fields.get("quant_algo")
    if str(algorithm).upper() not in MODELOPT_ALGORITHMS:
        raise reader.refusal("quant_algo", algorithm, MODELOPT_ALGORITHMS)
    return WeightScheme("fp8")


def _mxfp4(reader: ConfigReader) -> WeightScheme:
    return WeightScheme("mxfp4")


def _compressed_tensors(reader: ConfigReader) -> WeightScheme:
    reader.allow("format", (None, *COMPRESSED_FORMATS))
    sparsity = reader.object_at("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise reader.refusal("sparsity_config.format", sparsity["format"], ("dense",))
    if transforms := reader.object_at("transform_config").get("config_groups"):
        named = list(transforms) if isinstance(transforms, dict) else transforms
        raise reader.refusal("transform_config.config_groups", named, ("none",))
    groups = reader.fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.refusal("config_groups", groups, ("an object with at least one group of weights",))
    blocks = {_group_block(reader, f"config_groups.{name}", group) for name, group in groups.items()} - {None}
    if len(blocks) > 1:
        raise reader.refusal("block_structure", sorted(blocks, key=str), ("one for all groups",))
    return WeightScheme("compressed-tensors", block=blocks.pop() if blocks else None)


def _group_block(reader: ConfigReader, name: str, group: Any) -> tuple[int, int] | None:
    """Check a group of modules and return the block of its scales, or None."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise reader.refusal(f"{name}.weights", weights, ("an object",))
    inner = reader.of(f"{name}.weights", weights)
    if group.get("format") is not None:
        reader.of(name, group).allow("format", COMPRESSED_FORMATS)
    kind = inner.allow("type", ("int", "float"))
    inner.allow("num_bits", INTEGER_BITS if kind == "int" else (8,))
    strategy = inner.allow("strategy", INT_STRATEGIES if kind == "int" else FLOAT_STRATEGIES)
    return inner.block("block_structure", weights.get("block_structure")) if strategy == "block" else None


METHODS: Final[Mapping[str, Callable[[ConfigReader], WeightScheme]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""Readers by `quant_method`."""
