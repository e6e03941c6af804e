"""When a sequence ends, by tokens. Prefill and decode workers apply the same rule, so they always agree."""

from __future__ import annotations

from collections.abc import Collection

from common.wire import SamplingParams


def finish_reason(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    *,
    num_output_tokens: int,
    token_id: int,
    num_tokens: int,
    max_model_len: int,
) -> str:
    """ "stop", "length" or "" (go on) after `token_id` was sampled.

    `num_output_tokens` and `num_tokens` (prompt + output) count `token_id`. An end token counts only after
    `min_tokens` other tokens; `banned_tokens` keeps it from being sampled earlier.
    """
    if num_output_tokens > params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token_id in eos_token_ids:
            return "stop"
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return ""


def banned_tokens(params: SamplingParams, eos_token_ids: Collection[int], num_output_tokens: int) -> tuple[int, ...]:
    """Tokens the next sample must not be: the end tokens while `min_tokens` would not be reached by it."""
    if num_output_tokens >= params.min_tokens:
        return ()
    return tuple(eos_token_ids) + params.stop_token_ids
