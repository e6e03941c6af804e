"""`python -m benchmarks.gpu_worker SHAPE prefill|decode FLAGS`: a worker with random weights of a shape.

It is the worker process of a cluster, with its flags, but makes its weights instead of reading them. Every worker makes
the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu_model import random_model
from benchmarks.gpu_shape import SHAPES, GPUShape
from benchmarks.role_offer import offer_of
from common.config import WorkerConfig
from common.model.load import torch_device
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.runner.loaded import LoadedModel
from common.worker.duty import DutyOffer
from common.worker.process import WorkerProcess, end_process, run_worker

PROGRAM = "python -m benchmarks.gpu_worker"
SEED = 0


def load_random(shape: GPUShape, config: WorkerConfig) -> tuple[ModelFiles, LoadedModel]:
    """Files from `--model`, a folder that `write_folder` wrote, and random weights."""
    files = resolve_model(config.model, progress=False)
    torch.manual_seed(SEED)
    return files, LoadedModel.of(lambda: random_model(shape, torch_device(config.device)), files, config)


class RandomWorker(WorkerProcess):
    """A worker of a shape."""

    def __init__(self, shape: GPUShape, home: DutyOffer) -> None:
        super().__init__(home)
        self._shape = shape

    def _load(self) -> tuple[ModelFiles, LoadedModel]:
        return load_random(self._shape, self.config)


def main(argv: Sequence[str]) -> int:
    shape, offer = SHAPES[argv[0]], offer_of(argv[1], argv[2:], PROGRAM)
    return run_worker(lambda: RandomWorker(shape, offer))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
