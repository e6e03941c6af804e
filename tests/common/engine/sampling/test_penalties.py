"""Penalties of a batch, with counts that grow, give bit for bit the logits of the plain way, row by row and anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.sampling.penalties import Adjustment, GrowingArray, LogitChanges, TokenCounts
from common.grammar import BANNED
from common.wire.sampling_params import SamplingParams

VOCAB = 97
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.3},
    {"frequency_penalty": -0.2},
    {"presence_penalty": -1.1, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"logit_bias": ((3, 1.7), (VOCAB, 1.0), (0, -0.1)), "repetition_penalty": 1.2},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def plain(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int]
) -> Tensor:
    """One row, of all of its tokens: what the sampler did before it kept counts."""
    logits = logits.clone()
    bias = [(token, value) for token, value in params.logit_bias if 0 <= token < len(logits)]
    if bias:
        index = torch.tensor([token for token, _ in bias])
        logits.index_add_(0, index, torch.tensor([value for _, value in bias]))
    if params.repetition_penalty != 1.0:
        index = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64)
        value = logits[index]
        logits[index] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and output:
        index, count = torch.unique(torch.tensor(output, dtype=torch.int64), return_counts=True)
        logits[index] -= params.frequency_penalty * count + params.presence_penalty
    logits[torch.tensor([token for token in banned if 0 <= token < len(logits)], dtype=torch.int64)] = BANNED
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_that_grows_is_adjusted_as_each_row_anew(seed: int, device: str) -> None:
    """Steps of one or some tokens, some rows with a draft that comes true, in part or not at all."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [SamplingParams(max_tokens=1, **fields) for fields in PENALTIES * 2]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 30)))] for _ in params]
    outputs: list[list[int]] = [[] for _ in params]
    counts = [TokenCounts(prompt) for prompt in prompts]
    for _ in range(40):
        drafts = [[rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 4)))] for _ in params]
        banned = [(5, VOCAB + 1) if rng.random() < 0.2 else () for _ in params]
        logits = torch.randn(len(params), VOCAB, generator=generator)
        expected = [
            plain(logits[i], params[i], prompts[i], outputs[i] + drafts[i], banned[i]) for i in range(len(params))
        ]
        found = logits.to(device)
        rows = [Adjustment(*row) for row in zip(params, counts, drafts, banned, strict=True)]
        LogitChanges.of(rows, VOCAB).apply(found)
        assert torch.equal(found.cpu(), torch.stack(expected))
        for i, draft in enumerate(drafts):
            new = [*draft[: rng.randrange(len(draft) + 1)], rng.randrange(VOCAB)] if rng.random() < 0.9 else []
            outputs[i] += new
            counts[i].push(new)
            assert counts[i].num_output_tokens == len(outputs[i])


def test_a_step_looks_at_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the sequence is: else a token of a long one costs as much as its prompt."""
    sizes: list[int] = []
    append = GrowingArray.append
    counts = TokenCounts(i % VOCAB for i in range(100_000))
    row = Adjustment(SamplingParams(max_tokens=1, repetition_penalty=1.1, presence_penalty=1.0), counts, (), ())
    counts.push([i % 50 for i in range(10_000)])
    before = LogitChanges.of([row], VOCAB)

    def noted(array: GrowingArray, numbers: Sequence[int]) -> None:
        sizes.append(len(numbers))
        append(array, numbers)

    monkeypatch.setattr(GrowingArray, "append", noted)
    counts.push([1, 2])
    after = LogitChanges.of([row], VOCAB)
    assert sizes and max(sizes) <= 2
    assert len(before.repeated) == len(after.repeated) == VOCAB
    assert len(before.output) == len(after.output) == 50
