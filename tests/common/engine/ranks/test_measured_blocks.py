"""How many KV blocks ranks have that measure it, as real processes over memory that is pretended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.config import WorkerConfig
from common.engine.kv.cache import block_bytes
from common.engine.ranks import loading
from common.engine.run.kv_memory import TRIAL_SHARE
from common.engine.run.loaded import LoadedModel
from common.errors import ConfigError, DiptychError
from common.machine.child_process import ChildProcess
from common.model_files.tiny import make_tiny_model

from ....rank_rig import worker
from ..models.generation import prompt, transformers_greedy, transformers_model
from .pretended_memory import CALLS, FREE_GIB, GIB, STEP, PretendedDevice
from .test_ranks import go_on, run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("measured") / "tiny")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float, float], Path]:
    """Say how many GiB are free on rank 0 and on the others; returns a file that they touch once they have."""
    launch = ChildProcess.launch

    def pretend(child: ChildProcess, command: Sequence[str], **options: Any) -> None:
        assert command[1:4] == ["-P", "-m", "common.engine.ranks"]
        launch(child, [sys.executable, "-m", "tests.common.engine.ranks.pretended_memory", *command[4:]], **options)

    def free(here: float, there: float) -> Path:
        monkeypatch.setenv(FREE_GIB, str(there))
        monkeypatch.setenv(CALLS, str(tmp_path / "measured"))
        monkeypatch.setattr(ChildProcess, "launch", pretend)
        monkeypatch.setattr(WorkerConfig, "kv_gib", 0.0)
        monkeypatch.setattr(loading, "CUDAMemory", lambda device: PretendedDevice(device, here))
        return tmp_path / "measured"

    return free


SETTINGS: dict[str, Any] = {"num_blocks": 0, "max_num_seqs": 3, "local_prefill_chunk": 64, "cuda_graphs": False}


def fitting(loaded: LoadedModel, *free_gib: float) -> list[int]:
    """How many blocks fit on each of these devices beside steps, which had as many blocks as all can try."""
    config, size = loaded.runner.model.config, loaded.kv.block_size
    per_block = block_bytes(config, size, "float32")
    most = [max(2, min(-(-config.max_model_len // size), int(TRIAL_SHARE * gib * GIB / per_block))) for gib in free_gib]
    return [(int(gib * GIB) - STEP) // per_block + min(most) for gib in free_gib]


@pytest.mark.parametrize(("here", "there"), [pytest.param(0.01, 0.004, marks=pytest.mark.slow), (0.004, 0.01)])
def test_the_smallest_rank_decides_and_answers_are_the_models(
    folder: Path, devices: Callable[[float, float], Path], here: float, there: float
) -> None:
    measured = devices(here, there)
    with worker(folder, 2, **SETTINGS) as loaded:
        assert measured.exists()
        fits = fitting(loaded, here, there)
        assert loaded.kv.num_blocks == min(fits) < max(fits)
        expected, _ = transformers_greedy(transformers_model(folder), prompt(40), 8)
        tokens, last = prompt(40), loaded.kv.num_blocks
        table = range(last - 4, last)  # the last blocks, which each rank must have
        assert go_on(loaded, [*tokens, run(loaded, tokens, 0, table)], 7, table) == expected[1:]


@pytest.mark.slow
def test_a_rank_without_room_is_named(folder: Path, devices: Callable[[float, float], Path]) -> None:
    devices(0.01, 1e-9)
    refused = pytest.raises(ConfigError, match="fewer than 2 KV blocks fit on another rank")
    with refused, worker(folder, 2, **SETTINGS):
        pass


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_the_wait_to_measure(
    folder: Path, devices: Callable[[float, float], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, plans = devices(0.01, 0.01), loading.plans

    def spoilt(*arguments: Any) -> Any:
        return [replace(plan, quantization="int3") for plan in plans(*arguments)]

    monkeypatch.setattr(loading, "plans", spoilt)
    with pytest.raises(DiptychError), worker(folder, 2, **SETTINGS):
        pass
    assert not measured.exists()
