"""What rows need beside a draw is done on the device, for the batch: the host waits for nothing; answers are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.grammar.token_rules import TokenLimits
from common.wire.sampling_params import SamplingParams

from ....pretended_gpu import HostWaited, on_gpu, pretended_gpu

VOCAB = 333
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"top_p": 0.8, "logprobs": 0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    {"temperature": 0.0, "logit_bias": ((3, 9.0), (VOCAB, 1.0), (7, -5.0)), "logprobs": 20},
    {"top_k": 9, "allowed_token_ids": (1, 32, 33, 332)},
    {"temperature": 0.0, "logprobs": 25},
    {"logprobs": 1, "logprob_token_ids": (5, 400, 2)},
    {"presence_penalty": 1.0, "allowed_token_ids": (3, 5, 90), "logprobs": 3, "logprob_token_ids": (5, 2)},
]


def rows_of(count: int) -> list[SamplingRow]:
    """Every kind beside every other one; some end tokens are banned as well."""
    return [
        SamplingRow(
            SamplingParams(max_tokens=1, seed=i, **KINDS[i % len(KINDS)]),
            i,
            (3, 5, 5, i),
            (90, 91),
            TokenLimits(banned=(i % 50, VOCAB + 1) if i % 3 else ()),
        )
        for i in range(count)
    ]


def logits_of(count: int) -> Tensor:
    """Few values, so many tokens tie; one row is not finite."""
    logits = (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2)) * 4).round() / 2
    logits[11] = torch.nan
    return logits


def test_a_mixed_batch_is_sampled_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, rows, logits = Sampler(VOCAB), rows_of(40), logits_of(40)
    expected = [sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    with pretended_gpu(monkeypatch):
        launched = sampler.launch(on_gpu(logits.clone()), sampler.prepare(rows))
        assert launched.ids.device.type == "cuda"
        found = launched.read()
    together = sampler.sample(logits, rows)
    for tokens in (found, together, expected):
        no_token = tokens.pop(11)
        assert no_token.token_id >= VOCAB and no_token.logprobs is None
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert found == together == expected


def test_plain_rows_are_not_touched_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, logits = Sampler(VOCAB), logits_of(40)
    with pretended_gpu(monkeypatch):
        before = on_gpu(logits.clone())
        sampler.launch(before, sampler.prepare(rows_of(40)))
    assert torch.equal(before.as_subclass(Tensor).nan_to_num(), logits.nan_to_num())


@pytest.mark.parametrize(
    "waits",
    [
        lambda there: there.tolist(),
        lambda there: there[0].item(),
        lambda there: there.nonzero(),
        lambda there: torch.unique(there),
        lambda there: there[there > 0],
        lambda there: there[[0, 1]],
        lambda there: torch.tensor([1], device="cuda"),
        lambda there: torch.ones(3).to(torch.device("cuda")),
        lambda there: torch.ones(3).copy_(there),
        lambda there: bool(there[0] > 0),
    ],
)
def test_the_pretended_gpu_sees_a_host_that_waits(
    waits: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_gpu(monkeypatch), pytest.raises(HostWaited):
        waits(on_gpu(torch.ones(3)))


@pytest.mark.gpu
def test_a_chip_is_not_waited_for() -> None:
    sampler, rows, logits = Sampler(VOCAB), rows_of(40), logits_of(40)
    expected, there = sampler.sample(logits, rows), logits.cuda()
    sampler.sample(there, rows)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = sampler.launch(there, sampler.prepare(rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ids: Sequence[int] = [token.token_id for token in launched.read()]
    assert ids == [token.token_id for token in expected]
