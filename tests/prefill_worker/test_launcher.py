"""Steps of prompts are launched on a GPU without a wait of the host: on a pretended one, which refuses each wait."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.blocks.block_hash import BlockHasher
from common.engine.models.batch import ForwardBatch, SequenceChunk
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.wire.messages import PrefillRequest
from common.wire.sampling_params import SamplingParams
from kernels import Linear
from prefill_worker.launcher import ChunkOutput, Pooler, PromptLauncher
from prefill_worker.scheduler import PrefillChunk, PrefillSequence

from ..pretended_gpu import GPU, HostWaited, OnGPU, on_gpu, pretended_gpu

VOCAB = 50


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_gpu(monkeypatch):
        yield


class Runner:
    """Its steps make the numbers that it was given."""

    def __init__(self, made: Tensor) -> None:
        self.kv = SimpleNamespace(device=torch.device("cpu"))  # of `on_device`; the numbers are where they are
        self.made = made

    def forward(self, chunks: object) -> Tensor:
        return self.made


def chunk(length: int, start: int, count: int, **params: Any) -> PrefillChunk:
    tokens = [(7 * place + length) % VOCAB for place in range(length)]
    known = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | params))
    request = PrefillRequest(request_id=f"r{length}", attempt=0, prompt=b"", params=known)
    sequence = PrefillSequence(b"", request, tokens, BlockHasher(16), 0.0, 60.0)
    return PrefillChunk(sequence, start, count)


def outputs(made: Tensor, chunks: list[PrefillChunk], pooler: Pooler | None) -> list[ChunkOutput]:
    """What a launch makes of a step whose model made `made`."""
    rows = [SamplingRow(c.sequence.params, c.end) for c in chunks if c.sample] if pooler is None else []
    launched = PromptLauncher(Runner(made), Sampler(VOCAB), pooler).launch(chunks, rows)  # type: ignore[arg-type]
    return list(launched.read())


def test_first_tokens_and_logprobs_of_prompts_are_launched_without_a_wait(gpu: None) -> None:
    chunks = [
        chunk(9, 0, 9, prompt_logprobs=2, logprobs=3), chunk(20, 4, 6, prompt_logprobs=0), chunk(30, 0, 8),
        chunk(12, 4, 8, temperature=0.7, seed=4, logit_bias=((3, 4.0),)),
    ]  # fmt: skip
    logits = torch.randn(9 + 6 + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    found = outputs(on_gpu(logits), chunks, None)
    assert found == outputs(logits, chunks, None)
    assert [len(output.logprobs) for output in found] == [8, 6, 0, 0]
    assert [output.sampled is not None for output in found] == [True, False, False, True]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_launched_without_a_wait(gpu: None, pooling: Any) -> None:
    found = []
    states = torch.randn(13 if pooling == "mean" else 1, 4, generator=torch.Generator().manual_seed(1))
    for made in (on_gpu(states), states):
        chunks = [chunk(9, 0, 9, pooling=pooling), chunk(30, 0, 4, pooling=pooling)]
        found.append(outputs(made, chunks, Pooler(pooling)))
    assert found[0] == found[1] and [bool(output.vector) for output in found[0]] == [True, False]


def test_a_score_is_launched_without_a_wait(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "__call__", lambda self, x: x.sum(1, keepdim=True))
    states = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    chunks = [chunk(9, 0, 9, pooling="last"), chunk(5, 0, 5, pooling="last")]
    pooler = Pooler("last", Linear(torch.ones(1, 4)))
    assert outputs(on_gpu(states), chunks, pooler) == outputs(states, chunks, pooler)


def test_a_steps_inputs_are_sent_without_a_wait(gpu: None, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and a row, with adapters and places of hidden states, in one copy beside the plan's own."""
    monkeypatch.setattr("common.engine.models.batch.plan_attention", lambda *arguments: None)
    config = SimpleNamespace(**{name: getattr(tiny[0].config, name) for name in ("vocab_size", "num_heads", "window")})
    config.max_model_len, config.draft_head = 512, "eagle"
    asked = [
        SequenceChunk(range(3, 20), 0, (4, 2), sample=False, kept=5),
        SequenceChunk((7,), 40, (1, 3, 0), adapter=1, before=2, kept=2),
        SequenceChunk((9, 9, 9), 16, (9, 8), all_logits=True),
    ]
    built = []
    for device in (GPU, torch.device("cpu")):
        kv = SimpleNamespace(device=device, layout=None, block_size=16, num_blocks=12)
        built.append(ForwardBatch.build(asked, config, kv))  # type: ignore[arg-type]
    there, here = built
    with pytest.raises(HostWaited):
        there.token_ids.tolist()
    assert isinstance(there.slots, OnGPU) and there.hidden is not None and here.hidden is not None
    pairs = [
        (getattr(there, name), getattr(here, name))
        for name in ("token_ids", "positions", "slots", "sampled", "adapters")
    ]
    pairs += [(there.hidden.before, here.hidden.before), (there.hidden.kept, here.hidden.kept)]
    for theirs, ours in pairs:
        assert torch.equal(theirs.as_subclass(Tensor), ours) and theirs.as_subclass(Tensor).dtype == torch.int64
