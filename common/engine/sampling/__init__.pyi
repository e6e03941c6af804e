"""Sampling, penalties and log probabilities."""

from common.engine.sampling.logprobs import (
    LaunchedLogprobs,
    chunk_logprobs,
    launch_chunk_logprobs,
    max_prompt_logprobs,
    separate,
    token_logprobs,
)
from common.engine.sampling.penalties import TokenCounts, needs_counts
from common.engine.sampling.sampled import LaunchedTokens
from common.engine.sampling.sampler import UNSAMPLED, PreparedRows, Sampler, SamplingRow, allowed_mask

__all__ = [
    "LaunchedLogprobs",
    "LaunchedTokens",
    "PreparedRows",
    "Sampler",
    "SamplingRow",
    "TokenCounts",
    "UNSAMPLED",
    "allowed_mask",
    "chunk_logprobs",
    "launch_chunk_logprobs",
    "max_prompt_logprobs",
    "needs_counts",
    "separate",
    "token_logprobs",
]
