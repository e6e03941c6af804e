"""What the commands of both workers do: read the settings, pin the cores, run the process until SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from common.config import WorkerConfig
from common.config.sources import load
from common.observe.logging import setup_logging

if TYPE_CHECKING:
    from common.worker.process import WorkerProcess

C = TypeVar("C", bound=WorkerConfig)


def run_command(argv: Sequence[str], config_type: type[C], role: str, build: Callable[[C], WorkerProcess]) -> int:
    """The exit status: 0 after a clean end, 2 when settings or model are refused."""
    config = load(config_type, argv, prog=f"diptych {role}-worker")
    setup_logging(config.worker_id or role, config.log_level, json=config.log_json)
    # Imported here: --help and refused settings need no torch, and `spin_briefly` must come before it.
    from common.machine.compute_threads import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    from common.worker.process import run_worker

    return run_worker(lambda: build(config))
