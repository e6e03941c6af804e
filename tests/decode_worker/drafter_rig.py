"""A draft model, and limits, for engines of tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.draft_heads.drafting_model import DraftingModel
from common.draft_heads.load import load_drafting_model
from common.kv.cache import KVCache
from common.model.decoder import Decoder
from common.model.load import load_model
from common.model_files.resolve import resolve_model
from common.runner.runner import ModelRunner
from common.sampling.sampler import Sampler
from common.sequences.hidden_places import HiddenPlaces
from decode_worker.drafting.draft_cache import DraftCache
from decode_worker.drafting.drafter import Drafter
from decode_worker.drafting.head_drafter import HeadDrafter
from decode_worker.limits import DecodeLimits


@dataclass(frozen=True)
class Headed:
    """A model alone, for the truth, and together with a draft head."""

    alone: Decoder
    together: DraftingModel

    @classmethod
    def load(cls, served: Path, head: str, *, num_places: int = 16) -> Headed:
        files = resolve_model(str(served))
        return cls(load_model(files), load_drafting_model(files, head, num_places=num_places))


def head_drafter_of(headed: Headed, runner: ModelRunner, sampler: Sampler) -> HeadDrafter:
    """Whose own steps seem to cost nothing."""
    drafter = HeadDrafter(runner, headed.together, sampler, HiddenPlaces(headed.together.num_places))
    drafter.costs.seconds = lambda num_rows: 0.0  # type: ignore[method-assign]
    return drafter


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
