"""What `make gpu` does with memory that GPUs share: over a pretended driver, and on a chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.node.ipc import ipc_rows
from benchmarks.gpu.node.landing import measure_landing, of_landing
from benchmarks.gpu.node.verdict import of_ipc
from benchmarks.gpu.shape import SHAPES

from .... import pretended_cuda

SHAPE = replace(SHAPES["dry"], moved_blocks=4)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_cuda.pretended(monkeypatch):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
def test_the_rate_and_a_killed_owner() -> None:
    rate, killed = ipc_rows(SHAPE, torch.device("cpu"), pretended_cuda.use)
    assert rate["gb_per_s"] > 0 and not of_ipc(rate).skipped
    assert killed["survived"] and killed["rounds"] > 1 and not killed["wrong"] and of_ipc(killed).ok


@pytest.mark.usefixtures("pretended")
def test_transfers_from_gpu_to_gpu_land_during_replays() -> None:
    row = measure_landing(SHAPE, torch.device("cpu"), 0.1)
    assert row["paths"] == 3 and row["transfers"] >= 3 and not row["failure"]
    assert of_landing(row).ok and not row["other_bytes"]


@pytest.mark.gpu
def test_on_a_chip() -> None:
    rate, killed = ipc_rows(SHAPE, torch.device("cuda"))
    assert rate["gb_per_s"] > 0 and killed["survived"], killed
