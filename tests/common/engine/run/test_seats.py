"""Seats on the device: whatever comes, goes or fails, a step runs what filling everything anew would give it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from common.blocks.window import HOLE, Window
from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.seats import FROM_HOST, Seats
from common.errors import BlockError, ContextLengthExceeded, InvalidRequest
from common.model_files.architecture.rope import RopeConfig
from common.model_files.config import ModelConfig
from common.wire.sampling_params import SamplingParams
from kernels.interface.seats import SeatLayout

from ....seated import SeatedDevice, SeatedStep, empty_seats

VOCAB, SIZE, NUM_BLOCKS, NUM_SEATS, LONGEST = 97, 4, 40, 6, 64


def config_of(window: int = 0) -> ModelConfig:
    return ModelConfig(
        model_type="llama", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, hidden_size=16,
        intermediate_size=16, vocab_size=VOCAB, max_model_len=LONGEST, rms_norm_eps=1e-5, layer_windows=(window,),
        layer_ropes=(RopeConfig(10_000.0),), attention_scale=0.25,
    )  # fmt: skip


def device_of(window: int = 0) -> SeatedDevice:
    config = config_of(window)
    return SeatedDevice(config, KVCache(config, NUM_BLOCKS, SIZE, "float32"), NUM_SEATS, LONGEST // SIZE)


@dataclass(eq=False)
class Sequence:
    """`tokens` the host knows; one more is on its way while it is `pending`."""

    tokens: list[int]
    params: SamplingParams
    adapter: int
    blocks: list[int] = field(default_factory=list)
    num_gone: int = 0
    pending: bool = False


class Engine:
    """Decodes as the worker's pipeline does, at random: a step in flight while the next one is launched."""

    def __init__(self, seed: int, window: int) -> None:
        self.random, self.device = random.Random(seed), device_of(window)
        self.window, self.pool = Window(window, SIZE), BlockPool(NUM_BLOCKS, SIZE, enable_prefix_caching=False)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []  # preempted or paused
        self.in_flight: tuple[SeatedStep, list[Sequence], list[int]] | None = None
        self.ended: list[Sequence] = []  # whose last step is in flight
        self.num_steps = 0

    def join(self) -> None:
        if len(self.running) < NUM_SEATS:
            length = self.random.randrange(1, 20)
            params = SamplingParams(
                max_tokens=9, temperature=self.random.choice((0.0, 0.7)), top_p=self.random.choice((0.9, 1.0)),
                min_p=self.random.choice((0.0, 0.1)), top_k=self.random.choice((0, 5)),
                seed=self.random.randrange(-(2**63), 2**63),
            )  # fmt: skip
            tokens = [self.random.randrange(VOCAB) for _ in range(length)]
            self.running.append(Sequence(tokens, params, self.random.choice((-1, 0, 3))))

    def leave(self) -> None:
        """A sequence that ends while a step of it is in flight keeps its blocks until that has ended."""
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            if sequence.pending:
                self.ended.append(sequence)
            else:
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks[sequence.num_gone :])
        sequence.blocks, sequence.num_gone = [], 0

    def preempt(self) -> None:
        self.complete()
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            self.release(sequence)
            self.waiting.append(sequence)

    def pause(self) -> None:
        """For a hand-over: it keeps its blocks."""
        self.complete()
        if self.running:
            self.waiting.append(self.running.pop())

    def resume(self) -> None:
        if self.waiting and len(self.running) < NUM_SEATS:
            self.running.insert(self.random.randrange(len(self.running) + 1), self.waiting.pop(0))

    def fail(self) -> None:
        """The step in flight fails: its sequences end."""
        if self.in_flight is not None:
            _, sequences, _ = self.in_flight
            self.complete()
            for sequence in sequences:
                if sequence in self.running:
                    self.running.remove(sequence)
                    self.release(sequence)

    def complete(self) -> None:
        """The step in flight runs, as late as can be, and the host gets its tokens."""
        if self.in_flight is None:
            return
        (step, sequences, tokens), self.in_flight = self.in_flight, None
        size = self.random.randrange(len(sequences), NUM_SEATS + 1)
        step.run(tokens, size)
        sampled = [self.random.randrange(VOCAB) for _ in sequences]
        self.device.sampled[: len(sampled)] = torch.tensor(sampled)
        self.num_steps += 1
        for sequence, token in zip(sequences, sampled, strict=True):
            sequence.tokens.append(token)
            sequence.pending = False
            if sequence in self.ended:
                self.ended.remove(sequence)
                self.release(sequence)
            elif sequence.blocks and self.window:
                first = self.window.first_block(len(sequence.tokens) - 1)
                gone = sequence.blocks[sequence.num_gone : first]
                self.pool.release(gone)
                sequence.blocks[sequence.num_gone : first] = [HOLE] * len(gone)
                sequence.num_gone += len(gone)

    def step(self) -> None:
        """Launches a step before the one in flight has run."""
        if not self.running:
            self.complete()
            return
        before = self.in_flight
        rows_of = {id(sequence): row for row, sequence in enumerate(before[1])} if before else {}
        for sequence in list(self.running):
            start = len(sequence.tokens) + sequence.pending - 1
            missing = start // SIZE + 1 - len(sequence.blocks)
            if start + 1 >= LONGEST or missing > self.pool.num_available:
                self.running.remove(sequence)
                if sequence.pending:
                    self.ended.append(sequence)
                else:
                    self.release(sequence)
            elif missing > 0:
                more = min(self.pool.num_available, LONGEST // SIZE - len(sequence.blocks), missing)
                sequence.blocks += self.pool.allocate(more)
        chunks, sources = [], []
        for sequence in self.running:
            start = len(sequence.tokens) + sequence.pending - 1
            tokens = (0,) if sequence.pending else (sequence.tokens[-1],)
            chunks.append(
                SequenceChunk(tokens, start, sequence.blocks, adapter=sequence.adapter, params=sequence.params)
            )
            sources.append(rows_of.get(id(sequence), FROM_HOST) if sequence.pending else FROM_HOST)
        sequences = list(self.running)
        if not chunks:
            self.complete()
            return
        launched = self.device.launch(chunks, sources)
        self.complete()
        for sequence in sequences:
            sequence.pending = True
        self.in_flight = launched, sequences, [sequence.tokens[-1] for sequence in sequences]


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_gives_what_filling_anew_gives(seed: int, window: int) -> None:
    engine = Engine(seed, window)
    events = [engine.step] * 8 + [engine.join] * 3
    events += [engine.leave, engine.preempt, engine.resume, engine.pause, engine.fail, engine.complete]
    for _ in range(200):
        engine.random.choice(events)()
        assert len(engine.running) <= NUM_SEATS
    engine.complete()
    assert engine.num_steps > 50
    owned = [each.blocks[each.num_gone :] for each in (*engine.running, *engine.waiting)]
    engine.pool.check_integrity(owned)


def row(start: int, table: list[int], token: int = 0, **params: float) -> SequenceChunk:
    sampling = SamplingParams(max_tokens=9, **({"temperature": 0.0} | params))  # type: ignore[arg-type]
    return SequenceChunk((token,), start, table, params=sampling)


def num_sent(step: SeatedStep) -> int:
    return len(step.changes.places)


def test_a_step_like_the_one_before_sends_nothing_and_a_new_block_one_word() -> None:
    device, tables = device_of(), [[3, 9], [4], [5]]
    step = device.launch([row(4 - 2 * i, table, 10 + i) for i, table in enumerate(tables)], [FROM_HOST] * 3)
    step.run([10, 11, 12], size=4)
    device.sampled[:3] = torch.tensor([20, 21, 22])
    step = device.launch([row(5 - 2 * i, table) for i, table in enumerate(tables)], [0, 1, 2])
    assert num_sent(step) == 0
    step.run([20, 21, 22], size=4)
    tables[1].append(7)
    step = device.launch([row(6 - 2 * i, table) for i, table in enumerate(tables)], [0, 1, 2])
    assert num_sent(step) == 1
    step.run([20, 21, 22])


def test_who_leaves_moves_no_seat() -> None:
    """The rows behind it move up: a word each, and none of their tables."""
    device, tables = device_of(), [[i] for i in range(4)]
    device.launch([row(1, table, 10 + i) for i, table in enumerate(tables)], [FROM_HOST] * 4).run([10, 11, 12, 13])
    device.sampled[:4] = torch.tensor([20, 21, 22, 23])
    step = device.launch([row(2, tables[i]) for i in (0, 2, 3)], [0, 2, 3])
    assert num_sent(step) == 3
    step.run([20, 22, 23], size=4)


def test_a_table_that_is_another_one_of_the_same_length_is_sent_anew() -> None:
    device = device_of()
    device.launch([row(5, [3, 9], 10)], [FROM_HOST]).run([10])
    step = device.launch([row(6, [3, 8])], [0])
    assert num_sent(step) == 2
    step.run([0])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (row(4, [2]), BlockError),
        (row(3, [NUM_BLOCKS]), BlockError),
        (row(3, [2, NUM_BLOCKS]), BlockError),  # which a later step would follow
        (row(3, [2, -1]), BlockError),
        (row(3, [2], VOCAB), InvalidRequest),
        (row(LONGEST, list(range(20))), ContextLengthExceeded),
    ],
)
def test_what_is_refused_sends_nothing_and_feeds_nothing(bad: SequenceChunk, error: type[Exception]) -> None:
    device = device_of()
    device.launch([row(3, [0], 10)], [FROM_HOST]).run([10])
    with pytest.raises(error):
        device.launch([row(4, [0, 1]), bad], [0, FROM_HOST])
    with pytest.raises(InvalidRequest, match="a step continues row 0, but the previous step had 0 rows"):
        device.launch([row(4, [0, 1])], [0])
    device.launch([row(4, [0, 1], 11)], [FROM_HOST]).run([11])


def test_a_row_that_goes_on_beyond_its_table_is_refused() -> None:
    device, table = device_of(), [5]
    device.launch([row(3, table, 10)], [FROM_HOST]).run([10])
    with pytest.raises(BlockError, match="5 tokens require 2 blocks of 4, but the table has 1"):
        device.launch([row(4, table)], [0])


def seats_on() -> Seats:
    config = config_of()
    kv = KVCache(config, NUM_BLOCKS, SIZE, "float32")
    return Seats(SeatLayout(NUM_SEATS, 8, SIZE), config, kv)


def test_a_row_that_goes_on_beyond_what_a_seat_holds_is_refused() -> None:
    seats, table = seats_on(), list(range(20))
    seats.take([row(31, table)], [FROM_HOST])
    with pytest.raises(ContextLengthExceeded):
        seats.take([row(32, table)], [0])


def test_the_check_finds_what_differs() -> None:
    seats, table = seats_on(), [3, 9]
    memory = empty_seats(seats.layout)
    changes = seats.take([row(5, table, 10), row(2, [6], 11)], [FROM_HOST] * 2)
    memory.index_copy_(0, *map(torch.from_numpy, changes))
    with pytest.raises(BlockError, match="expected"):
        seats.check_integrity(memory)  # the step has not run: positions stand still
    words = memory[NUM_SEATS:].view(NUM_SEATS, -1)
    words[:2, 0] += 1
    words[:2, 1] = torch.arange(2)
    seats.check_integrity(memory)
    for place in (1, NUM_SEATS + 9):
        right = int(memory[place])
        memory[place] = 5
        with pytest.raises(BlockError):
            seats.check_integrity(memory)
        memory[place] = right
    table[1] = 8
    with pytest.raises(BlockError, match=r"from its sequence's block table in entries \[1\] of 2"):
        seats.check_integrity(memory)


def test_what_rows_of_a_step_want_is_known_on_the_host() -> None:
    seats = seats_on()
    seats.take([row(5, [3, 9], 10), row(2, [6], 11, temperature=0.5)], [FROM_HOST] * 2)
    seats.take([row(6, [3, 9]), row(3, [6])], [0, 1])
    assert not seats.has_adapters and not seats.searches
    adapted = row(7, [3, 9])._replace(adapter=1)
    seats.take([adapted, row(0, [6], 4, top_p=0.5)], [FROM_HOST] * 2)
    assert seats.has_adapters and seats.searches
    seats.take([row(1, [6])], [1])
    assert not seats.has_adapters and seats.searches
