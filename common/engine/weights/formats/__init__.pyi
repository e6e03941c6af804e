from common.engine.weights.formats.kv_scales import KVCacheFormat
from common.engine.weights.formats.registry import read_weight_format
from common.engine.weights.formats.stored import HEAD, TABLE, StoredForm, StoredTensor

__all__ = [
    "HEAD",
    "KVCacheFormat",
    "StoredForm",
    "StoredTensor",
    "TABLE",
    "read_weight_format",
]
