from common.model_files.families.family import DecoderName, Family, GGUFFacts, NormPlace
from common.model_files.families.registry import FAMILIES, WRAPPERS, gguf_family

__all__ = [
    "DecoderName",
    "FAMILIES",
    "Family",
    "GGUFFacts",
    "NormPlace",
    "WRAPPERS",
    "gguf_family",
]
