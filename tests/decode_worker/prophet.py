"""Draft tokens of a test's own making: the true tokens, some of them wrong, for engines to which rows cost nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import Counter

from decode_worker import speculation
from decode_worker.drafting.draft_tokens import LONGEST_MATCH, NOTHING, Draft

Rig = Any  # EngineRig of conftest, which other modules cannot import


class Prophet:
    """Knows whole texts, prompts and answers, and takes the place of every sequence's `PromptLookup`."""

    def __init__(self, patch: pytest.MonkeyPatch, *, wrong: float = 0.2) -> None:
        """Of its tokens a share of `wrong` is another one."""
        self.texts: list[list[int]] = []
        self.wrong, self._rng = wrong, random.Random(1)
        patch.setattr(speculation, "PromptLookup", lambda: self)
        patch.setattr(speculation.RowCosts, "seconds", lambda costs, num_rows: 1.0)

    def learn(self, tokens: list[int], answer: list[int]) -> None:
        self.texts.append([*tokens, *answer])

    def draft_for(self, token_ids: Sequence[int], num_unseen: int, num_tokens: int) -> Draft:
        known = list(token_ids)
        for text in self.texts:
            if text[: len(known)] == known:
                rest = text[len(known) : len(known) + num_unseen + num_tokens]
                said = tuple(t if self._rng.random() >= self.wrong else self._rng.randrange(256) for t in rest)
                return Draft(said[num_unseen:], said[:num_unseen], (LONGEST_MATCH,) * len(said))
        return NOTHING


def counted(rig: Rig) -> dict[str, int]:
    """What an engine's metrics say: steps, tokens, and of those drafted, how many were right."""
    metrics = rig.engine.metrics
    counters = {
        "steps": metrics.steps,
        "tokens": metrics.generation_tokens,
        "drafted": metrics.drafts.tokens,
        "right": metrics.drafts.accepted,
    }
    return {name: int(total(counter)) for name, counter in counters.items()}


def total(counter: Counter, **labels: str) -> float:
    """The sum of a counter's series, or of those that have these labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    asked = (sample for sample in samples if sample.name.endswith("_total") and labels.items() <= sample.labels.items())
    return sum(sample.value for sample in asked)
