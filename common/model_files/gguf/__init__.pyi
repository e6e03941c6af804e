from common.model_files.gguf.metadata import rope_factors
from common.model_files.gguf.quantised import BITS, GROUP, unpack_mxfp4
from common.model_files.gguf.tensors import GGUFFile

__all__ = [
    "BITS",
    "GGUFFile",
    "GROUP",
    "rope_factors",
    "unpack_mxfp4",
]
