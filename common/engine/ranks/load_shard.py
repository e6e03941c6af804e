"""Loads one rank's part of a model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from common.engine.kv import torch_dtype
from common.engine.models import (
    DECODERS,
    Assembler,
    Collectives,
    Decoder,
    StoredWeights,
    TensorParallel,
    check_batch_invariant,
    effective_quantization,
    log_treated,
    open_model,
    reading,
    torch_device,
)
from common.engine.ranks.sharded_source import ShardedSource
from common.model_files import ModelConfig, Quantization
from common.model_files.architecture import Shard, check_size

if TYPE_CHECKING:
    from common.model_files import ModelFiles


def open_for_ranks(files: ModelFiles, size: int) -> tuple[ModelConfig, StoredWeights]:
    """Configuration of the whole model and its unread weights. ConfigError where `size` ranks cannot share it."""
    config, source = open_model(files)
    check_size(config, size)
    return config, source


def load_shard(
    files: ModelFiles,
    shard: Shard,
    collectives: Collectives,
    *,
    dtype: str,
    device: str,
    quantization: str,
    with_head: bool = True,
    batch_invariant: bool = False,
) -> Decoder:
    """Reads the slices of one rank, and no more. Options and errors as `load_model`, and as `open_for_ranks`."""
    config, source = open_for_ranks(files, shard.size)
    place = torch_device(device)
    if batch_invariant:
        check_batch_invariant(place)
    wanted = effective_quantization(quantization, source, place)
    own = shard.of(config)
    held = replace(own, vocab_size=len(shard.part(config.vocab_size)))
    rounded = wanted if place.type == "cpu" else Quantization.NONE
    sliced = ShardedSource(source, config, shard, rounded)
    assembler = Assembler(held, sliced, torch_dtype(dtype), place, wanted, batch_invariant=batch_invariant)
    with nullcontext() if shard.rank else reading(files, assembler, source, config):
        weights = assembler.assemble(with_head=with_head)
    decoder = DECODERS[config.family.decoder](own, weights)
    if not shard.rank:
        log_treated(files, assembler)
    decoder.join_ranks(TensorParallel(shard, config.vocab_size, collectives))
    return decoder
