"""A Llama of any size with random weights, made on its device without reading a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.shape import GPUShape
from common.engine.models.llama import Llama
from common.engine.models.weights import Assembler
from common.model_files.config import ModelConfig


class RandomWeights:
    """A `WeightSource` of random tensors. Matrices keep the variance of their inputs."""

    label = "random weights"
    norm_offset = 0.0
    has_quantised = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def has(self, name: str) -> bool:
        return False

    def is_quantised(self, name: str) -> bool:
        return False

    def read_quantised(self, name: str, *, floats: bool = False) -> None:
        return None

    def read(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(self._config.hidden_size, device=self._device)
        rows, columns = self._matrix(name)
        return torch.randn(rows, columns, dtype=self._dtype, device=self._device).mul_(float(columns) ** -0.5)

    def _matrix(self, name: str) -> tuple[int, int]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return config.vocab_size, hidden
        sizes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        return sizes[name.split(".")[-2]]


def random_model(shape: GPUShape, device: torch.device, *, batch_invariant: bool = False) -> Llama:
    """A model with random weights, different in every process."""
    source = RandomWeights(shape.config, shape.dtype, device)
    assembler = Assembler(shape.config, source, shape.dtype, device, batch_invariant=batch_invariant)
    return Llama(shape.config, assembler.assemble())


def write_folder(shape: GPUShape, folder: Path) -> Path:
    """Write a model folder for a router: the shape's configuration and a byte tokenizer. Its weights stay unused."""
    from common.model_files.tiny import make_tiny_model  # needs tokenizers

    make_tiny_model(folder)
    config = shape.hugging_face() | {"bos_token_id": 256, "eos_token_id": 257}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
