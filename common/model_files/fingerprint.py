"""Fingerprints. Two workers exchange KV blocks only if theirs are equal. Does not load torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

KV_LAYOUT_VERSION = 12
"""Increased when the meaning of a block's bytes changes. Workers of different versions cannot exchange blocks."""


def weights_fingerprint(model_id: str, weights_hash: str, quantization: str) -> str:
    """Return 16 hex digits over model and weights, excluding layout and type of the KV cache."""
    fields = json.dumps([model_id, weights_hash, quantization])
    return hashlib.blake2b(fields.encode(), digest_size=8).hexdigest()


def layout_fingerprint(
    model_id: str,
    weights_hash: str,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kv_dtype: str,
    quantization: str,
    block_size: int,
    latent_dim: int,
    batch_invariant: bool,
    draft_head: str,
    kv_scales: Sequence[tuple[float, float]],
) -> str:
    """Return 32 hex digits over everything that determines the meaning of a KV block's bytes.

    `kv_scales` are (key, value) scales of each layer, or () if all are 1.
    """
    fields = {
        "model_id": model_id,
        "weights_hash": weights_hash,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "quantization": quantization,
        "block_size": block_size,
        "protocol_version": KV_LAYOUT_VERSION,  # a name of older versions
        "order": "block,layer,slot,dim" if latent_dim else "block,layer,kv_head,slot,kv,dim",
        "latent_dim": latent_dim,
        "batch_invariant": batch_invariant,  # KV computed without it depends on the batch in its last bits
        "draft_head": draft_head,
        "kv_scales": kv_scales,
    }
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
