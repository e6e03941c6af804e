"""IBM's Granite 3: Llama with multipliers, dense and with experts."""

from __future__ import annotations

from common.model_files.architecture import ExpertsConfig, ExpertStack, FieldReader, experts_in_all_layers, gguf_experts
from common.model_files.families.family import ExpertFacts, Family, GGUFFacts
from common.model_files.families.llama import LLAMA


def _gguf_experts(reader: FieldReader, num_layers: int) -> ExpertsConfig | None:
    found = gguf_experts(reader, num_layers, inner="feed_forward_length")
    if found is not None and (shared := int(reader.number("expert_shared_feed_forward_length", 0))):
        raise reader.refuse(f"expert_shared_feed_forward_length {shared}", "experts without a shared one")
    return found


def _scale(reader: FieldReader) -> float:
    return reader.number("attention_multiplier")


FAMILIES = (
    Family(
        model_type="granite",
        defaults=LLAMA.defaults,
        attention_scale=_scale,
        gguf=GGUFFacts(architecture="granite", interleaves=True),
    ),
    Family(
        model_type="granitemoe",
        defaults={**LLAMA.defaults, "num_experts": 8, "num_experts_per_tok": 2},
        attention_scale=_scale,
        experts=ExpertFacts(
            read=experts_in_all_layers,
            read_gguf=_gguf_experts,
            router="block_sparse_moe.router.layer",
            module="block_sparse_moe.experts",
            stack=ExpertStack(
                "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", inputs_first=False
            ),
        ),
        gguf=GGUFFacts(architecture="granitemoe", interleaves=True),
    ),
)
