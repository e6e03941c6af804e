"""Tensors of checkpoints: read from safetensors and GGUF files, cut for a rank, dequantised where needed."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
