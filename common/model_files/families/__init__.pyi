from common.model_files.families.family import DecoderName, Family, GGUFFacts, NormPlace
from common.model_files.families.registry import FAMILIES, GGUF_ARCHITECTURES, WRAPPERS, gguf_family

__all__ = [
    "DecoderName",
    "FAMILIES",
    "Family",
    "GGUFFacts",
    "GGUF_ARCHITECTURES",
    "NormPlace",
    "WRAPPERS",
    "gguf_family",
]
