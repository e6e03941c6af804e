from common.engine.weights.gguf_weights import GGUFWeights
from common.engine.weights.safetensors_weights import QuantisedSafetensors, SafetensorsWeights

__all__ = [
    "GGUFWeights",
    "QuantisedSafetensors",
    "SafetensorsWeights",
]
