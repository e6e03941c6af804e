"""What a configuration says of a model's architecture: layers, rotary embedding, experts, latents, shards."""

from common.model_files.architecture.experts import STACKS, ExpertsConfig, ExpertStack
from common.model_files.architecture.latent import NORM_EPS, LatentConfig
from common.model_files.architecture.rope import RopeConfig
from common.model_files.architecture.shard import Shard, check_size, kv_owners

__all__ = [
    "ExpertStack",
    "ExpertsConfig",
    "LatentConfig",
    "NORM_EPS",
    "RopeConfig",
    "STACKS",
    "Shard",
    "check_size",
    "kv_owners",
]
