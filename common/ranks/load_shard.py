"""Loads one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.kv.cache import torch_dtype
from common.model.decoder import Decoder
from common.model.load import FAMILIES, open_model, torch_device
from common.model.quantised_safetensors import QuantisedSafetensors
from common.model.safetensors_weights import SafetensorsWeights
from common.model.tensor_parallel import Collectives, TensorParallel
from common.model.weights import Assembler
from common.model_config.shard import Shard, check_size
from common.model_files.config import ModelConfig
from common.ranks.sharded_source import ShardedSource

if TYPE_CHECKING:
    from common.model_files.files import ModelFiles


def open_for_ranks(files: ModelFiles, size: int) -> tuple[ModelConfig, SafetensorsWeights]:
    """Configuration of the whole model and its unread weights. ConfigError where `size` ranks cannot share it."""
    config, source = open_model(files)
    if not isinstance(source, SafetensorsWeights) or isinstance(source, QuantisedSafetensors):
        kind = "GGUF file" if files.format == "gguf" else "quantised checkpoint"
        raise ConfigError("tensor_parallel_size", size, f"1 for a {kind}; more for safetensors of floats")
    check_size(config, size)
    return config, source


def load_shard(files: ModelFiles, shard: Shard, collectives: Collectives, *, dtype: str, device: str) -> Decoder:
    """Reads the slices of one rank, and no more. Errors as `open_for_ranks` and `load_model`."""
    config, source = open_for_ranks(files, shard.size)
    own = shard.of(config)
    held = replace(own, vocab_size=len(shard.part(config.vocab_size)))
    sliced = ShardedSource(source, config, shard)
    weights = Assembler(held, sliced, torch_dtype(dtype), torch_device(device)).assemble()
    decoder = FAMILIES[config.family](own, weights)
    decoder.join_ranks(TensorParallel(shard, config.vocab_size, collectives))
    return decoder
