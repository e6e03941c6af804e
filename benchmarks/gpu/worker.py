"""`python -m benchmarks.gpu.worker SHAPE prefill|decode FLAGS`: a worker with random weights of a shape.

It is the worker process of a cluster, with its flags, but makes its weights instead of reading them. Every worker makes
the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.model import random_model
from benchmarks.gpu.shape import SHAPES, GPUShape
from common.config import WorkerConfig
from common.engine.models.load import torch_device
from common.engine.run.loaded import LoadedModel
from common.engine.worker.command import run_role
from common.engine.worker.contract import DutyOffer
from common.engine.worker.loop_model import LoopModel
from common.engine.worker.process import WorkerProcess, end_process
from common.model_files.files import ModelFiles
from common.wire.message_fields import ROLES

SEED = 0


def load_random(shape: GPUShape, files: ModelFiles, config: WorkerConfig) -> LoopModel:
    """Random weights for `files`, a folder that `write_folder` wrote."""
    torch.manual_seed(SEED)
    loaded = LoadedModel.of(lambda: random_model(shape, torch_device(config.torch_device)), files, config)
    return LoopModel.of(files, loaded, config)


def random_worker(shape: GPUShape, home: DutyOffer[LoopModel], other: DutyOffer[LoopModel] | None) -> WorkerProcess:
    """Create a worker of a shape."""
    return WorkerProcess(replace(home, load=lambda files: load_random(shape, files, home.config)), other)


def main(argv: Sequence[str]) -> int:
    shape = SHAPES[argv[0]]
    (role,) = (role for role in ROLES if role == argv[1])
    return run_role(role, argv[2:], lambda home, other: random_worker(shape, home, other))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
