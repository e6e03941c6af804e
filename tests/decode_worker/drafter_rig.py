"""A draft model, and limits, for engines of tests."""

from __future__ import annotations

from common.kv.cache import KVCache
from common.model.decoder import Decoder
from common.runner.runner import ModelRunner
from common.sampling.sampler import Sampler
from decode_worker.drafting.draft_cache import DraftCache
from decode_worker.drafting.drafter import Drafter
from decode_worker.limits import DecodeLimits


def drafter_of(draft: Decoder, sampler: Sampler, num_blocks: int) -> Drafter:
    """Whose own steps seem to cost nothing."""
    kv = KVCache(draft.config, num_blocks, 16, "float32")
    drafter = Drafter(ModelRunner(draft, kv), sampler, DraftCache(num_blocks, 16))
    drafter.costs.seconds = lambda num_rows: 0.0  # type: ignore[method-assign]
    return drafter


def patient_limits(max_draft_tokens: int) -> DecodeLimits:
    """No transfer of a test takes so long."""
    return DecodeLimits(
        grant_timeout_s=30.0,
        transfer_timeout_s=30.0,
        handover_timeout_s=30.0,
        max_draft_tokens=max_draft_tokens,
    )
