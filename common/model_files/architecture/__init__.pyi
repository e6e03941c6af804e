from common.model_files.architecture.experts import (
    SIGMOID_GATING,
    ExpertsConfig,
    ExpertStack,
    check_groups,
    count_experts,
    expect,
    experts_in_all_layers,
    gguf_experts,
    gguf_grouped_experts,
    grouped_experts,
)
from common.model_files.architecture.fields import FieldReader
from common.model_files.architecture.latent import NORM_EPS, LatentConfig
from common.model_files.architecture.rope import RopeConfig
from common.model_files.architecture.shard import Shard, check_size, kv_owners

__all__ = [
    "ExpertStack",
    "ExpertsConfig",
    "FieldReader",
    "LatentConfig",
    "NORM_EPS",
    "RopeConfig",
    "SIGMOID_GATING",
    "Shard",
    "check_groups",
    "check_size",
    "count_experts",
    "expect",
    "experts_in_all_layers",
    "gguf_experts",
    "gguf_grouped_experts",
    "grouped_experts",
    "kv_owners",
]
