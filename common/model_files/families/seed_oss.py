"""ByteDance's Seed-OSS."""

from __future__ import annotations

from common.model_files.families.family import GGUF_NORMS, Family, GGUFFacts, sizes

FAMILIES = (
    Family(
        model_type="seed_oss",
        defaults=sizes(155136, 4096, 27648, 64, 80, 8, 524288)
        | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        output_bias="attention_out_bias",
        gguf=GGUFFacts(architecture="seed_oss", norms={**GGUF_NORMS, "before_mlp": "post_attention_norm"}),
    ),
)
