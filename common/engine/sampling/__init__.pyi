from common.engine.sampling.draw import draw_of
from common.engine.sampling.logprobs import (
    LaunchedLogprobs,
    chunk_logprobs,
    launch_chunk_logprobs,
    max_prompt_logprobs,
    separate,
    token_logprobs,
)
from common.engine.sampling.penalties import TokenCounts
from common.engine.sampling.sampler import (
    UNSAMPLED,
    LaunchedTokens,
    PreparedRows,
    Sampler,
    SamplingRow,
    allowed_mask,
)

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
    "draw_of",
    "launch_chunk_logprobs",
    "max_prompt_logprobs",
    "separate",
    "token_logprobs",
]
