"""Meta's Llama 2 and 3, SmolLM2, and derived models."""

from __future__ import annotations

from common.model_files.families.family import Family, GGUFFacts, sizes

LLAMA = Family(
    model_type="llama",
    defaults=sizes(32000, 4096, 11008, 32, 32, None, 2048),
    gguf=GGUFFacts(architecture="llama", interleaves=True),
)
FAMILIES = (LLAMA,)
