"""Engines that draft, to which rows cost nothing, and the true answers of their models, for tests of all drafters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.engine.kv.cache import KVCache
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.engine.run.step_launchers import StepThread
from common.engine.sampling.sampler import Sampler
from common.engine.sequences.hidden_states import HiddenStateSlots
from common.model_files.resolve import resolve_model
from common.wire.sampling_params import BadWord, ThinkingBudget
from decode_worker import speculation
from decode_worker.drafting import row_costs
from decode_worker.drafting.draft_tokens import NOTHING
from decode_worker.drafting.drafter import DraftCache, Drafter
from decode_worker.drafting.head_drafter import HeadDrafter
from decode_worker.engine import DecodeLimits

from ..engine_rig import prompt
from .lazy_device import LazyDevice
from .prophet import counted

Rig = Any  # EngineRig of conftest, which test modules cannot import
LAUNCHERS = ("waited for", "on a thread", "on a lazy device")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "temperature": 0.5},
    "logprobs": {"min_tokens": 30, "logprobs": 2},
    "bias": {"logit_bias": ((5, 4.0), (6, 4.0)), "temperature": 1.0},
    "allowed": {
        "allowed_token_ids": (65, 66, 67),
        "bad_words": (BadWord.of((65, 65)), BadWord.of((67, 66, 67))),
        "temperature": 1.0,
    },
    "thoughts": {"thinking": ThinkingBudget(9, (70, 71, 72))},
    "grammar": {"grammar": r"start: /[a-p]{30,60}/", "temperature": 1.0},
}
KINDS_BY_LAUNCHER = [
    *((launcher, "greedy") for launcher in LAUNCHERS),
    *zip(itertools.cycle((LAUNCHERS[1], LAUNCHERS[0], LAUNCHERS[2])), [kind for kind in KINDS if kind != "greedy"]),
]
"""Each kind with one launcher; test_speculation.py has each with all."""


class NoLookup:
    """Finds nothing in texts: all draft tokens are the model's."""

    def draft_for(self, *arguments: object) -> Any:
        return NOTHING


@contextmanager
def engines_that_draft(
    kind: str, make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, **drafter: object
) -> Iterator[Callable[..., Rig]]:
    """Makes engines whose steps run as `kind` of LAUNCHERS says, by default with `drafter`."""
    threads: list[StepThread] = []

    def threaded(runner: ModelRunner, sampler: Sampler) -> StepThread:
        threads.append(StepThread(runner, sampler))
        return threads[-1]

    launcher = dict(zip(LAUNCHERS, (None, threaded, LazyDevice), strict=True))[kind]
    monkeypatch.setattr(speculation, "PromptLookup", NoLookup)
    monkeypatch.setattr(row_costs.RowCosts, "seconds", lambda costs, num_rows: 1.0)
    yield lambda **options: make_engine(**{"launcher": launcher, "max_draft_tokens": 5} | drafter | options)
    for thread in threads:
        thread.close()


def answered(rig: Rig, lengths: tuple[int, ...] = (1, 17, 40), **params: Any) -> dict[str, int]:
    """The counts after some answers of 40 tokens, which are the true ones."""
    for length in lengths:
        rig.ask(prompt(length, length), f"r{length}", max_tokens=40, **params)
    rig.until(lambda: rig.is_clean)
    for length in lengths:
        assert rig.tokens(f"r{length}") == rig.oracle(prompt(length, length), 40, **params), length
    return counted(rig)


# A draft model, and limits, for engines of tests.


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
    drafter = HeadDrafter(runner, headed.together, sampler, HiddenStateSlots(headed.together.num_places))
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
