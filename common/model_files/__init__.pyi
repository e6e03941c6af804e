from common.model_files.builtin import DEFAULT_MODEL, builtin_name
from common.model_files.config import HFReader, ModelConfig, from_hf
from common.model_files.files import ModelFiles
from common.model_files.fingerprint import layout_fingerprint, weights_fingerprint
from common.model_files.gguf_config import TensorFacts, from_gguf
from common.model_files.json_file import read_json
from common.model_files.library import (
    LocalModel,
    download_place,
    find_model,
    hold_model,
    hub_cache,
    local_models,
    release_models,
    remove_model,
)
from common.model_files.model_cache import cache_folder
from common.model_files.quantization import Quantization
from common.model_files.received import MAX_HEAD_BYTES, ReceivedWeights, with_received
from common.model_files.resolve import resolve_model
from common.model_files.stamp import hash_weights
from common.model_files.summary import ModelSummary, summary_of
from common.model_files.task import GENERATES, ServedTask, Task, served_task
from common.model_files.template import ChatTemplate, ContentForm
from common.model_files.tokenizer import BYTE_TOKEN, Tokenizer
from common.model_files.weight_paths import weight_files
from common.model_files.weight_scheme import (
    AWQ_BITS,
    INTEGER_BITS,
    FormatName,
    KVScheme,
    WeightScheme,
    read_kv_scheme,
    read_weight_scheme,
)

__all__ = [
    "AWQ_BITS",
    "BYTE_TOKEN",
    "ChatTemplate",
    "ContentForm",
    "DEFAULT_MODEL",
    "FormatName",
    "GENERATES",
    "HFReader",
    "INTEGER_BITS",
    "KVScheme",
    "LocalModel",
    "MAX_HEAD_BYTES",
    "ModelConfig",
    "ModelFiles",
    "ModelSummary",
    "Quantization",
    "ReceivedWeights",
    "ServedTask",
    "Task",
    "TensorFacts",
    "Tokenizer",
    "WeightScheme",
    "builtin_name",
    "cache_folder",
    "download_place",
    "find_model",
    "from_gguf",
    "from_hf",
    "hash_weights",
    "hold_model",
    "hub_cache",
    "layout_fingerprint",
    "local_models",
    "read_json",
    "read_kv_scheme",
    "read_weight_scheme",
    "release_models",
    "remove_model",
    "resolve_model",
    "served_task",
    "summary_of",
    "weight_files",
    "weights_fingerprint",
    "with_received",
]
