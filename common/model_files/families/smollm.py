"""Hugging Face's SmolLM3, with some layers without rotary embedding. SmolLM2 is a Llama."""

from __future__ import annotations

from common.model_files.families.family import Family, GGUFFacts, Windows, sizes

FAMILIES = (
    Family(
        model_type="smollm3",
        defaults=sizes(128256, 2048, 11008, 36, 16, 4, 32768)
        | {"rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4},
        windows=Windows(asked_for=True),
        rotates="listed",
        gguf=GGUFFacts(architecture="smollm3", interleaves=True),
    ),
)
