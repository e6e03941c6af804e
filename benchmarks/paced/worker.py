"""`python -m benchmarks.paced.worker COEFFICIENTS prefill|decode FLAGS`: a worker whose model waits (`model.py`).

It is the worker process of a cluster, with its flags, engine, scheduler, sockets and KV bytes. `--model` is a folder
that `model.write_folder` wrote. The file COEFFICIENTS has the pace of both kinds of worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.paced.model import Coefficients, PacedModel, PacedRunner
from benchmarks.role_command import run_role
from common.config import WorkerConfig
from common.errors import ConfigError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.runner.loaded import LoadedModel, Makers
from common.wire.message_fields import ROLES
from common.worker.duty import DutyOffer
from common.worker.process import WorkerProcess, end_process

PROGRAM = "python -m benchmarks.paced.worker"


def load_paced(
    coefficients: Coefficients, config: WorkerConfig, role: Callable[[], str]
) -> tuple[ModelFiles, LoadedModel]:
    """`role` is asked at each step. Raises ConfigError for settings with which the KV would not stay as it is."""
    if config.device != "cpu":
        raise ConfigError("device", config.device, "cpu: a paced worker computes nothing")
    for field, value in (("kv_cache_dtype", "auto"), ("kv_wire_dtype", "native")):
        if getattr(config, field, value) != value:
            raise ConfigError(field, getattr(config, field), f"{value}: answers depend on every bit of the KV")
    files = resolve_model(config.model, progress=False)
    assert files.config is not None  # a folder has one
    model = PacedModel(files.config.parent)
    makers = Makers(runner=lambda kv: PacedRunner(model, kv, coefficients, role))
    return files, LoadedModel.of(lambda: model, files, config, makers)


class PacedWorker(WorkerProcess):
    """A worker at a pace, that of its present role."""

    def __init__(self, coefficients: Coefficients, home: DutyOffer, other: DutyOffer | None) -> None:
        super().__init__(home, other)
        self._coefficients = coefficients

    def _load(self) -> tuple[ModelFiles, LoadedModel]:
        return load_paced(self._coefficients, self.config, lambda: self.duties.role)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or argv[1] not in ROLES:
        raise SystemExit(f"usage: {PROGRAM} COEFFICIENTS {'|'.join(ROLES)} FLAGS")
    coefficients = Coefficients.read(Path(argv[0]))
    return run_role(argv[1], argv[2:], lambda home, other: PacedWorker(coefficients, home, other))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
