"""Registry of weight formats. Add new formats to `FORMATS`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.engine.weights.formats.awq import AWQ
from common.engine.weights.formats.compressed_tensors import CompressedTensors
from common.engine.weights.formats.float8 import Float8
from common.engine.weights.formats.format import ConfigReader, WeightFormat, quantization_fields
from common.engine.weights.formats.gptq import GPTQ
from common.engine.weights.formats.mxfp4 import MXFP4

FORMATS: tuple[type[WeightFormat], ...] = (GPTQ, AWQ, CompressedTensors, Float8, MXFP4)
METHODS: Mapping[str, type[WeightFormat]] = {method: each for each in FORMATS for method in each.methods}
"""Formats by `quant_method`."""


def read_weight_format(path: Path) -> WeightFormat | None:
    """Return the format of a config.json; None if weights are not quantised. Raises ModelError if not supported."""
    name, fields = quantization_fields(path)
    if not name or (isinstance(fields, dict) and _is_for_kv_alone(fields)):
        return None
    reader = ConfigReader(fields, path, name)
    method = reader.fields.get("quant_method")
    if method is None and "config_groups" in reader.fields:
        method = CompressedTensors.name  # early versions of compressed-tensors omit it
    if not isinstance(method, str) or method not in METHODS:
        raise reader.refusal("quant_method", method, tuple(METHODS))
    return METHODS[method].configured(reader)


def _is_for_kv_alone(fields: Mapping[str, Any]) -> bool:
    """Return whether a compressed-tensors configuration has a KV scheme but no group of weights."""
    is_compressed = fields.get("quant_method") in (None, CompressedTensors.name)
    return is_compressed and not fields.get("config_groups") and isinstance(fields.get("kv_cache_scheme"), dict)
