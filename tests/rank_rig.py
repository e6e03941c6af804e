"""Workers of several ranks as real processes, without engine and router around them: this process is rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig
from common.engine.ranks.loading import Ranks, load_ranked
from common.engine.run.loaded import LoadedModel
from common.model_files.resolve import resolve_model


@contextmanager
def worker(model: Path | str, size: int, **settings: object) -> Iterator[LoadedModel]:
    given = {"model": str(model), "dtype": "float32", "quantization": "none", "num_blocks": 32, **settings}
    config = DecodeWorkerConfig(**given, tensor_parallel_size=size)
    files = resolve_model(str(model))
    loaded = load_ranked(files, config) if size > 1 else LoadedModel.load(files, config)
    try:
        yield loaded
    finally:
        if loaded.others is not None:
            loaded.others.close()


@contextmanager
def recording_worker(model: Path | str, size: int, **settings: object) -> Iterator[LoadedModel]:
    """A worker whose ranks record their decode steps, as on GPUs: on a CPU a replay runs the step again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.engine.ranks.loading.records_steps", lambda config, device: True)
        with worker(model, size, **settings) as loaded:
            yield loaded


def rank_of(loaded: LoadedModel) -> int:
    """The process of its one other rank."""
    assert isinstance(loaded.others, Ranks)
    (rank,) = loaded.others.processes._ranks
    assert rank.child is not None
    return rank.child.pid
