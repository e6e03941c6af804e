"""Blocks of bfloat16 to measure with, and the rates of their conversion to 8-bit numbers and back."""

from __future__ import annotations

import time

from common.kv.cache import KVCache
from common.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.model_config.rope import RopeConfig
from common.model_files.config import ModelConfig

SLOTS, HEAD_DIM = 16, 64
HEAD_BYTES = SLOTS * 2 * HEAD_DIM * 2
"""One head of one layer in a block: keys and values in bfloat16. Blocks are made of as many as fill them."""


def bfloat16_cache(block_bytes: int, num_blocks: int) -> KVCache:
    """Blocks of random numbers. ValueError unless heads of 4 KiB fill a block."""
    if block_bytes % HEAD_BYTES:
        raise ValueError(f"blocks of {block_bytes} bytes are not made of heads of {HEAD_BYTES}")
    heads = block_bytes // HEAD_BYTES
    config = ModelConfig(
        family="llama",
        model_type="llama",
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        hidden_size=heads * HEAD_DIM,
        intermediate_size=1,
        vocab_size=1,
        max_model_len=num_blocks * SLOTS,
        rms_norm_eps=1e-5,
        layer_windows=(0,),
        layer_ropes=(RopeConfig(10_000.0),),
        attention_scale=HEAD_DIM**-0.5,
    )
    kv = KVCache(config, num_blocks, SLOTS, "bfloat16")
    kv.tensor.normal_()
    return kv


def conversion_rates(block_bytes: int, num_blocks: int) -> dict[str, float]:
    """GB/s of bfloat16 into 8-bit numbers and back, of one core's time, the fastest of three rounds."""
    kv = bfloat16_cache(block_bytes, num_blocks)
    outgoing, incoming = quantised_outgoing(kv), quantised_incoming(kv)
    frame = bytes(outgoing.view(0))
    seconds: dict[str, list[float]] = {"quantising": [], "dequantising": []}
    for _ in range(3):
        began = time.thread_time()
        for index in range(num_blocks):
            outgoing.view(index)
        seconds["quantising"].append(time.thread_time() - began)
        began = time.thread_time()
        for index in range(num_blocks):
            incoming.view(index)[:] = frame
            incoming.commit([index])
        seconds["dequantising"].append(time.thread_time() - began)
    return {name: round(block_bytes * num_blocks / min(samples) / 1e9, 3) for name, samples in seconds.items()}
