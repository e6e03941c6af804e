"""Formats of quantised checkpoints, one file each."""

from common.engine.weights.formats.kv_scales import KVForm
from common.engine.weights.formats.quantization_config import read_quantization_config
from common.engine.weights.formats.stored import HEAD, TABLE, StoredForm, StoredTensor

__all__ = [
    "HEAD",
    "KVForm",
    "StoredForm",
    "StoredTensor",
    "TABLE",
    "read_quantization_config",
]
