"""How much a worker pins for its steps: counted beside what steps of the largest size take."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.models.batch import ForwardBatch, SequenceChunk
from common.engine.run.kv_memory import MAX_BYTES, STEPS, reserve_step_copies, step_copy_bytes
from common.engine.run.memory_need import LargestSteps
from common.engine.sampling.logprobs import token_logprobs
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from kernels.interface.pinned_memory import granted, pinned
from kernels.interface.pinned_ring import PinnedPiece, PinnedRing

from ....pretended_gpu import GPU, on_gpu, pretended_gpu

VOCAB, ROWS, SIZE, LONGEST = 3000, 6, 16, 640
PENALISED = SamplingParams(
    max_tokens=8,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    logit_bias=((3, 1.0), (9, -2.0)),
    allowed_token_ids=tuple(range(50)),
    logprobs=MAX_TOP_LOGPROBS,
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What is taken of the ring, in bytes."""
    found: list[int] = []
    take = PinnedRing.take

    def counted(self: PinnedRing, num_bytes: int) -> PinnedPiece:
        piece = take(self, num_bytes)
        assert piece.loan.own is None
        found.append(piece.loan.end - piece.loan.begin)
        return piece

    monkeypatch.setattr(PinnedRing, "take", counted)
    with pretended_gpu(monkeypatch):
        yield found


def shape(**options: Any) -> Any:
    usual = {"vocab_size": VOCAB, "max_model_len": LONGEST, "num_heads": 2, "window": 0, "draft_head": "eagle"}
    return SimpleNamespace(**usual | options)


def largest(num_tokens: int, num_rows: int, **options: Any) -> LargestSteps:
    usual: dict[str, Any] = {"samples": True, "recorded": False, "share": 0.9, "block_size": SIZE}
    return LargestSteps(num_tokens=num_tokens, num_rows=num_rows, **usual | options)


def test_the_largest_steps_fit_side_by_side(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fill the step, then all that rows can want of the sampler, then a prompt's log-probabilities."""
    monkeypatch.setattr("common.engine.models.batch.plan_attention", lambda *arguments: None)
    step = largest(ROWS * 64, ROWS)
    reserve_step_copies(step, shape(), GPU)
    kv: Any = SimpleNamespace(device=GPU, layout=None, block_size=SIZE, num_blocks=1000)
    chunks = [SequenceChunk(range(64), LONGEST - 64, tuple(range(40)), adapter=1, kept=i) for i in range(ROWS)]
    ForwardBatch.build(chunks, shape(), kv)
    plan_bytes = 4 * ROWS * (3 + LONGEST // SIZE) + 8 * ROWS * 64 // 16  # spans and tables, tiles
    logits = on_gpu(torch.randn(ROWS, VOCAB))
    tokens = tuple(i * 7 % VOCAB for i in range(LONGEST))
    rows = [SamplingRow(PENALISED, LONGEST, tokens[:300], tokens[300:]) for _ in range(ROWS)]
    sampler = Sampler(VOCAB)
    sampler.launch(logits, sampler.prepare(rows))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    token_logprobs(on_gpu(torch.randn(ROWS * 64, VOCAB)), (5,) * ROWS * 64, MAX_TOP_LOGPROBS)
    assert len(taken) > 6
    assert STEPS * (sum(taken) + plan_bytes) <= step_copy_bytes(step, shape()) <= pinned().ring.num_bytes


def test_what_is_pinned_is_bounded() -> None:
    usual = step_copy_bytes(largest(8192, 32), shape(vocab_size=128_256, max_model_len=131_072))
    assert usual < 16 * 2**20
    assert step_copy_bytes(largest(8192, 4096, recorded=True), shape(max_model_len=2**20)) == MAX_BYTES


def test_recorded_steps_have_seats_too() -> None:
    plain, recorded = (step_copy_bytes(largest(64, ROWS, recorded=each), shape()) for each in (False, True))
    assert recorded - plain == STEPS * ROWS * 16 * (1 + 9 + LONGEST // SIZE)


def test_a_model_without_logits_takes_less() -> None:
    step = largest(512, ROWS, samples=False)
    assert step_copy_bytes(step, shape()) < step_copy_bytes(largest(512, ROWS), shape())


@pytest.mark.parametrize("config", [PrefillWorkerConfig(), DecodeWorkerConfig()])
def test_a_cpu_pins_nothing(config: Any) -> None:
    before = pinned().num_bytes
    reserve_step_copies(LargestSteps.of(config, samples=True), shape(), torch.device("cpu"))
    assert pinned().num_bytes == before


def test_a_gpu_pins_the_ring_once(taken: list[int]) -> None:
    for _ in range(2):
        reserve_step_copies(largest(512, ROWS), shape(), GPU)
        assert pinned().num_bytes == granted(step_copy_bytes(largest(512, ROWS), shape()))
