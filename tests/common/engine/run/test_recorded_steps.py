"""What a device runs of a recorded step on a machine without graphs, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.recorded_steps import RecordedSteps, StepLaunch, StepSizes, bucket_for, bucket_sizes
from common.engine.run.seats import SeatChanges
from common.model_files.resolve import resolve_model

from ....pretended_gpu import on_gpu, pretended_gpu


class NoRecorder:
    """Its replays do nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model(resolve_model("tiny-random"), dtype="float32", quantization="none")


def test_what_is_sent_is_not_waited_for(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVCache(model.config, 4, 16, "float32")
    steps = RecordedSteps(model, kv, NoRecorder(), StepSizes(4, 8))
    monkeypatch.setattr("common.engine.run.recorded_steps.on_device", lambda device: nullcontext())
    vars(kv)["device"] = torch.device("cuda")
    places, words = np.array([9, 3, 40]), np.array([-5, 2**40, 7])
    with pretended_gpu(monkeypatch):
        steps.seats = on_gpu(steps.seats)
        steps.launch(StepLaunch(2, False, SeatChanges(places, words)))
        steps.launch(StepLaunch(2, False, SeatChanges(places[:0], words[:0])))
    assert steps.seats.as_subclass(torch.Tensor)[places].tolist() == words.tolist()


def test_small_steps_have_a_size_of_their_own() -> None:
    assert bucket_sizes(36) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(1) == (1,)


@pytest.mark.parametrize("largest", [1, 5, 64, 255, 256, 257, 300, 1000, 4096])
def test_sizes_rise_to_the_largest_and_padding_stays_small(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest
    assert len(sizes) <= 100
    for count in range(1, largest + 1):
        size = bucket_for(sizes, count)
        assert size is not None and count <= size < count + max(8, count // 4 + 1)


def test_nothing_holds_more_than_the_largest_or_nothing() -> None:
    assert bucket_for((1, 2, 4), 5) is None
    assert bucket_for((1, 2, 4), 0) is None
    assert [bucket_for((1, 2, 4), count) for count in (1, 2, 3, 4)] == [1, 2, 4, 4]
