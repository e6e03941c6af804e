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
from common.engine.run.recorded_steps import RecordedSteps, StepLaunch, StepSizes
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
