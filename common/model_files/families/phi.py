"""Microsoft's Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from common.model_files.families.family import Family, GGUFFacts, Windows, sizes

FAMILIES = (
    Family(
        model_type="phi3",
        defaults=sizes(32064, 3072, 8192, 32, 32, None, 4096)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        qkv_bias=False,
        output_bias=False,
        fused_qkv=True,
        fused_gate_up=True,
        windows=Windows(),
        gguf=GGUFFacts(architecture="phi3", window=(0, 0)),
    ),
)
