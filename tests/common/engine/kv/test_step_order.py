"""What is cleared on other devices is cleared between two steps, whatever the devices do as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.kv import sharded_cache
from common.engine.kv.cache import KVCache, clear_slots
from common.engine.kv.sharded_cache import ShardedCache
from common.engine.kv.step_order import StepOrder
from common.model_files.architecture.shard import Shard
from common.model_files.config import ModelConfig, from_hf
from common.model_files.tiny import make_tiny_model

BLOCKS, BLOCK_SIZE, FIRST = 4, 16, 10
RANKS = 2
DEVICES = [torch.device("cuda", rank) for rank in range(RANKS)]


class Event:
    """A mark in a stream: reached once all that lies before it has run."""

    def __init__(self, stream: LateStream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        self.stream.run_to(self.place)


class LateStream:
    """Runs what is launched when something waits for it, and no more than that needs."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.num_ran = 0

    def launch(self, work: Callable[[], object]) -> None:
        self.launched.append(work)

    def record_event(self) -> Event:
        return Event(self, len(self.launched))

    def wait_event(self, event: Event) -> None:
        self.launch(event.synchronize)

    def run_to(self, place: int) -> None:
        while self.num_ran < place:
            self.num_ran += 1
            self.launched[self.num_ran - 1]()


class LateDevices(StepOrder):
    """Two devices of one process. `now` is the stream that work is launched on."""

    def __init__(self) -> None:
        super().__init__(DEVICES[0])
        self.streams = {device: LateStream() for device in DEVICES}
        self.now = self.streams[DEVICES[0]]

    def _stream(self, device: torch.device) -> Any:
        return self.streams[device]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Part:
    """Memory of a rank that says on which device it is."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._memory, self.device = memory, device

    def __getitem__(self, index: int) -> Tensor:
        return self._memory[index]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("order") / "tiny")
    return from_hf(folder / "config.json")


class Worker:
    """Rank 0 and its view of both ranks' memory; block 1 is full of ones."""

    def __init__(self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, order: LateDevices) -> None:
        self.order = order
        self.kv = ShardedCache(config, RANKS, BLOCKS, BLOCK_SIZE, "float32")
        other = KVCache(Shard(1, RANKS).of(config), BLOCKS, BLOCK_SIZE, "float32")
        self.memory = [self.kv.tensor, other.tensor]
        for memory in self.memory:
            memory[1] = 1.0
        parts: Any = [Part(memory, device) for memory, device in zip(self.memory, DEVICES, strict=True)]
        self.kv._parts, self.kv._order = parts, order
        monkeypatch.setattr(
            sharded_cache, "clear_slots", lambda block, first: order.now.launch(lambda: clear_slots(block, first))
        )

    def step(self, work: Callable[[], object]) -> Event:
        """Of rank 0: its end."""
        steps = self.order.streams[DEVICES[0]]
        steps.launch(work)
        return steps.record_event()

    @property
    def is_cleared(self) -> list[bool]:
        return [not memory[1][:, :, FIRST:].any() for memory in self.memory]


def test_the_end_of_the_next_step_is_that_of_the_clearing(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, seen = Worker(config, monkeypatch, LateDevices()), list[list[bool]]()
    before = worker.step(lambda: seen.append(worker.is_cleared))
    worker.kv.clear_slots(1, FIRST)
    assert worker.is_cleared == [False, False]  # launched, and not waited for
    end = worker.step(lambda: seen.append(worker.is_cleared))
    before.synchronize()
    assert worker.is_cleared == [False, False]
    end.synchronize()
    assert worker.is_cleared == [True, True]
    assert seen == [[False, False], [True, True]]  # neither before an earlier step has ended nor after the next begins
    assert all(memory[1][:, :, :FIRST].all() for memory in worker.memory)


def test_the_clearing_waits_for_steps_that_were_launched_before(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the other device is asked first: what those steps write there is not cleared under them."""
    worker, ran = Worker(config, monkeypatch, LateDevices()), list[str]()
    worker.step(lambda: ran.append("step"))
    worker.kv.clear_slots(1, FIRST)
    other = worker.order.streams[DEVICES[1]]
    other.launch(lambda: ran.append("behind the clearing"))
    other.record_event().synchronize()
    assert ran == ["step", "behind the clearing"] and worker.is_cleared == [False, True]


def test_what_is_cleared_late_cannot_clear_what_comes_later(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is another sequence's by then, whose slots another rank has written after the step's first sum."""
    worker = Worker(config, monkeypatch, LateDevices())
    worker.kv.clear_slots(1, FIRST)
    first_sum = worker.step(lambda: None)
    first_sum.synchronize()  # as the other rank does before it writes
    worker.memory[1][1] = 2.0
    for stream in worker.order.streams.values():
        stream.record_event().synchronize()
    assert (worker.memory[1][1] == 2.0).all()


def test_a_cpu_clears_at_once(config: ModelConfig) -> None:
    ran = list[int]()
    StepOrder(torch.device("cpu")).run(
        [(torch.device("cpu"), lambda number=number: ran.append(number)) for number in range(3)]
    )  # type: ignore[misc]
    assert ran == [0, 1, 2]
