"""`python -m benchmarks.gpu.worker SHAPE prefill|decode FLAGS`: a worker with random weights of a shape.

It is the worker process of a cluster, with its flags, but makes its weights instead of reading them. Every worker makes
the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu.model import random_model
from benchmarks.gpu.shape import SHAPES, GPUShape
from common.config import WorkerConfig
from common.engine.models.load import torch_device
from common.engine.run.loaded import LoadedModel
from common.engine.worker.command import run_role
from common.engine.worker.duty import DutyOffer
from common.engine.worker.process import WorkerProcess, end_process
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.wire.message_fields import ROLES

SEED = 0


def load_random(shape: GPUShape, config: WorkerConfig) -> tuple[ModelFiles, LoadedModel]:
    """Files from `--model`, a folder that `write_folder` wrote, and random weights."""
    files = resolve_model(config.model, progress=False)
    torch.manual_seed(SEED)
    return files, LoadedModel.of(lambda: random_model(shape, torch_device(config.torch_device)), files, config)


class RandomWorker(WorkerProcess):
    """A worker of a shape."""

    def __init__(self, shape: GPUShape, home: DutyOffer, other: DutyOffer | None) -> None:
        super().__init__(home, other)
        self._shape = shape

    def _load(self) -> tuple[ModelFiles, LoadedModel]:
        return load_random(self._shape, self.config)


def main(argv: Sequence[str]) -> int:
    shape = SHAPES[argv[0]]
    (role,) = (role for role in ROLES if role == argv[1])
    return run_role(role, argv[2:], lambda home, other: RandomWorker(shape, home, other))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
