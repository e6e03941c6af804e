"""Rank 0 and another one in one process: what each launch runs, and how many sums and messages it takes."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.models.batch import ForwardBatch, SequenceChunk
from common.engine.ranks.liveness import WaitDeadline
from common.engine.ranks.steps import Numbers, RankedGraphRunner, RankedRunner, StepExecutor
from common.engine.run.recorded_steps import PlainRecorder
from common.engine.run.runner import ModelRunner
from common.engine.run.seats import FROM_HOST
from common.errors import BlockError, ModelError
from common.model_files.architecture.rope import RopeConfig
from common.model_files.config import ModelConfig
from common.wire.sampling_params import SamplingParams

VOCAB, SIZE, NUM_BLOCKS, NUM_SEATS, LONGEST = 97, 4, 128, 6, 64
REPLAY_NUMBERS = 4
"""Of a message that changes nothing."""


class Model:
    """Remembers what it ran. Its logits depend on token and position."""

    dtype, device, quantization = torch.float32, torch.device("cpu"), "none"

    def __init__(self) -> None:
        self.config = ModelConfig(
            model_type="llama", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, hidden_size=16,
            intermediate_size=16, vocab_size=VOCAB, max_model_len=LONGEST, rms_norm_eps=1e-5, layer_windows=(0,),
            layer_ropes=(RopeConfig(10_000.0),), attention_scale=0.25,
        )  # fmt: skip
        self.ran: list[list[Any]] = []

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        plan: Any = batch.plan
        used = None if batch.adapters is None else batch.adapters.tolist()
        numbers = [batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), used]
        self.ran.append([*numbers, plan.spans.tolist(), plan.tables.tolist()])
        rows = torch.arange(batch.num_tokens) if batch.sampled is None else batch.sampled
        logits = torch.zeros(len(rows), VOCAB)
        logits[torch.arange(len(rows)), (7 * batch.token_ids + batch.positions)[rows] % VOCAB] = 9.0
        return logits


class Wire:
    """Between rank 0 and the other one, in place of processes and sums."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.tokens: deque[Tensor] = deque()

    def in_step(self) -> nullcontext[None]:
        return nullcontext()

    def send_step(self, message: Numbers) -> None:
        self.messages.append(message.tobytes())

    def give(self, numbers: Tensor) -> None:
        self.tokens.append(numbers.clone())

    def take(self, numbers: Tensor) -> None:
        numbers.copy_(self.tokens.popleft())


class Pair:
    """Two ranks. `deliver` has the other one do what was sent."""

    def __init__(self, *, adapts: bool = False) -> None:
        self.wire, self.models = Wire(), (Model(), Model())
        first, second = (KVCache(model.config, NUM_BLOCKS, SIZE, "float32") for model in self.models)
        others: Any = self.wire
        self.runner = RankedGraphRunner(
            self.models[0], first, PlainRecorder(), others, self.wire.give, WaitDeadline(60.0),
            max_num_seqs=NUM_SEATS, max_model_len=LONGEST, adapts=adapts,
        )  # fmt: skip
        self.other = StepExecutor(ModelRunner(self.models[1], second), self.wire.take)
        self.deliver()

    def draw(self, count: int) -> None:
        with torch.inference_mode():
            self.runner.draw(count)

    def deliver(self) -> list[int]:
        """How many numbers each message had."""
        sizes = [len(message) // 4 for message in self.wire.messages]
        while self.wire.messages:
            self.other.run(self.wire.messages.popleft())
        self.runner.check_integrity()
        assert not self.wire.tokens, "rank 0 came to a sum more"
        assert self.models[0].ran == self.models[1].ran
        return sizes


def row(start: int, table: list[int], token: int = 0, adapter: int = -1, **params: float) -> SequenceChunk:
    sampling = SamplingParams(max_tokens=9, **({"temperature": 0.0} | params))  # type: ignore[arg-type]
    return SequenceChunk((token,), start, table, adapter=adapter, params=sampling)


@dataclass(eq=False)
class Stream:
    adapter: int
    seed: int
    start: int = 0
    table: list[int] = field(default_factory=list)


class Streams:
    """Sequences that come and go at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.free, self.running = rng, list(range(NUM_BLOCKS)), list[Stream]()

    def change(self) -> None:
        for stream in [each for each in self.running if self.rng.random() < 0.1 or each.start >= LONGEST - 2]:
            self.running.remove(stream)
            self.free += stream.table
        if len(self.running) < NUM_SEATS and self.rng.random() < 0.5:
            self.running.append(Stream(self.rng.choice((-1, -1, 2)), self.rng.randrange(99)))
        self.rng.shuffle(self.running)

    def rows(self) -> list[SequenceChunk]:
        """The next step of each, in blocks that are there for it."""
        for each in self.running:
            if each.start // SIZE >= len(each.table):
                each.table.append(self.free.pop())
        return [row(each.start, each.table, 11, each.adapter, temperature=0.8, seed=each.seed) for each in self.running]

    def move_on(self) -> None:
        for each in self.running:
            each.start += 1


@pytest.mark.parametrize("seed", range(3))
def test_every_rank_runs_what_rank_0_runs(seed: int) -> None:
    """Sequences come, go, grow, are filled anew, run beside prompts: the same tokens at the same places, every time."""
    rng = random.Random(seed)
    pair, streams = Pair(adapts=True), Streams(rng)
    before: list[Stream] = []  # whose tokens are on the device alone
    num_fed = 0
    for _ in range(80):
        streams.change()
        if rng.random() < 0.2:  # a prompt, beside the rows if there are any: what was in flight has ended before
            prompt = SequenceChunk([rng.randrange(VOCAB) for _ in range(6)], 0, streams.free[:2])
            pair.runner.forward([*streams.rows(), prompt])
            streams.move_on()
            before = []
        if chunks := streams.rows():
            goes_on = [each in before and rng.random() < 0.9 for each in streams.running]
            sources = [
                before.index(each) if is_fed else FROM_HOST
                for each, is_fed in zip(streams.running, goes_on, strict=True)
            ]
            num_fed += sum(goes_on)
            pair.runner.launch(chunks, sources)
            if rng.random() < 0.5:
                pair.draw(len(chunks))
            else:  # as rows are sampled that need more than their parameters
                with torch.inference_mode():
                    pair.runner.sampled[: len(chunks)] = torch.tensor([rng.randrange(VOCAB) for _ in chunks])
            before = list(streams.running)
            streams.move_on()
        if rng.random() < 0.5:
            pair.deliver()
    pair.deliver()
    assert num_fed > 50
    assert {len(step[0]) for step in pair.models[1].ran} >= set(range(1, NUM_SEATS + 1))
    assert any(step[3] for step in pair.models[1].ran)


def test_a_step_like_the_one_before_is_one_message_of_four_numbers() -> None:
    pair, tables = Pair(), [[3, 9], [4]]
    pair.runner.launch([row(4, tables[0], 10), row(1, tables[1], 11)], [FROM_HOST] * 2)
    pair.draw(2)
    assert [size > REPLAY_NUMBERS for size in pair.deliver()] == [True]
    for step in range(2):
        pair.runner.launch([row(5 + step, tables[0]), row(2 + step, tables[1])], [0, 1])
        pair.draw(2)
    assert pair.deliver() == [REPLAY_NUMBERS] * 2
    tokens = [10, 11]
    for step in range(2):  # what rank 0 drew, of which the other one was told by no message
        tokens = [(7 * token + start + step) % VOCAB for token, start in zip(tokens, (4, 1), strict=True)]
    assert pair.models[1].ran[-1][0] == tokens


def test_what_is_refused_is_not_sent() -> None:
    pair = Pair()
    pair.runner.launch([row(3, [0], 10)], [FROM_HOST])
    pair.deliver()
    with pytest.raises(BlockError):
        pair.runner.launch([row(4, [0, NUM_BLOCKS])], [0])
    with pytest.raises(BlockError):
        pair.runner.forward([row(4, [0, 1]), SequenceChunk((1, 2), 0, (NUM_BLOCKS,))])
    assert not pair.wire.messages
    pair.runner.launch([row(4, [0, 1], 3)], [FROM_HOST])
    pair.deliver()


def test_a_rank_that_does_not_sample_keeps_no_logits() -> None:
    pair = Pair()
    recorded = pair.other._recorded
    assert recorded is not None and not recorded.logits.numel() and pair.runner.logits.numel()
    assert all(step.draw is None for step in recorded._steps.values())


def test_a_replay_without_a_recording_is_an_error() -> None:
    pair, model = Pair(), Model()
    pair.runner.launch([row(3, [0], 10)], [FROM_HOST])
    other = StepExecutor(ModelRunner(model, KVCache(model.config, 4, SIZE, "float32")), pair.wire.take)
    with pytest.raises(ModelError, match="rank 0 replays a step of 1 rows, but none was recorded"):
        other.run(pair.wire.messages.popleft())
    assert not model.ran


def test_a_wait_for_launched_steps_has_a_deadline() -> None:
    deadline = WaitDeadline(0.0)
    assert not deadline.failure
    with deadline.wait():
        with deadline.wait():
            assert (
                deadline.failure == "a launched step did not complete within 0 s: a rank did not reach its collectives"
            )
        assert deadline.failure
    assert not deadline.failure
    patient = WaitDeadline(60.0)
    with patient.wait():
        assert not patient.failure


@pytest.mark.parametrize("recorded", [True, False])
def test_waits_for_steps_are_those_with_the_deadline(monkeypatch: pytest.MonkeyPatch, *, recorded: bool) -> None:
    pair, seen, deadline = Pair(), list[str](), WaitDeadline(0.0)
    others: Any = pair.wire
    runner = pair.runner if recorded else RankedRunner(pair.models[0], pair.runner.kv, others, deadline)
    runner._deadline = deadline
    monkeypatch.setattr(ModelRunner, "wait", lambda runner: seen.append(deadline.failure))
    runner.wait()
    with runner.waiting():
        seen.append(deadline.failure)
    assert len(seen) == 2 and all("did not complete" in failure for failure in seen)
