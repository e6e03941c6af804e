from common.engine.models.batch import NO_SLOT, ROW_BEFORE, ForwardBatch, HiddenRows, SequenceChunk, check_chunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import (
    DECODERS,
    check_batch_invariant,
    effective_quantization,
    kv_form,
    load_model,
    load_score,
    log_treated,
    open_model,
    reading,
    torch_device,
)
from common.engine.models.lora import LayerSites
from common.engine.models.mlp import MLP, MixtureOfExperts, SharedExpert
from common.engine.models.rope import rotation_order
from common.engine.models.tensor_parallel import Collectives, TensorParallel, padded
from common.engine.models.tensor_reader import StoredWeights, WeightSource
from common.engine.models.weights import Assembler

__all__ = [
    "Assembler",
    "Collectives",
    "DECODERS",
    "Decoder",
    "ForwardBatch",
    "HiddenRows",
    "LayerSites",
    "MLP",
    "MixtureOfExperts",
    "NO_SLOT",
    "ROW_BEFORE",
    "SequenceChunk",
    "SharedExpert",
    "StoredWeights",
    "TensorParallel",
    "WeightSource",
    "check_batch_invariant",
    "check_chunk",
    "effective_quantization",
    "kv_form",
    "load_model",
    "load_score",
    "log_treated",
    "open_model",
    "padded",
    "reading",
    "rotation_order",
    "torch_device",
]
