"""What the commands of both workers do: read the settings, pin the cores, run the process until SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from common.config import WorkerConfig
from common.config.field import AUTO
from common.config.sources import counterpart, exit_refused, load
from common.errors import ConfigError
from common.machine.gpus import find_gpus_here, gpu_refusal, placement_message, with_device
from common.observe.logging import setup_logging

if TYPE_CHECKING:
    from common.worker.process import WorkerProcess

log = logging.getLogger(__name__)
C = TypeVar("C", bound=WorkerConfig)
Other = TypeVar("Other", bound=WorkerConfig)


def run_command(
    argv: Sequence[str],
    config_type: type[C],
    other_type: type[Other],
    role: str,
    build: Callable[[C, Other | None], WorkerProcess],
) -> int:
    """The exit status: 0 after a clean end, 2 when settings or model are refused.

    `build` also gets the settings of the other role, if the worker may change to it.
    """
    prog = f"diptych {role}-worker"
    config = load(config_type, argv, prog=prog)
    try:
        other = counterpart(config, other_type) if config.role_change else None
    except ConfigError as error:
        exit_refused(error, prog)
    setup_logging(config.worker_id or role, config.log_level, json=config.log_json)
    # Imported here: --help and refused settings need no torch, and `spin_briefly` must come before it.
    from common.machine.compute_threads import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    if config.device == AUTO:
        config, other = _on_found_device(config, other, prog)
    from common.worker.process import run_worker

    return run_worker(lambda: build(config, other))


def _on_found_device(config: C, other: Other | None, prog: str) -> tuple[C, Other | None]:
    """Replace `--device auto` in the settings of both roles, and log the choice."""
    gpus = find_gpus_here()
    refusal = gpu_refusal(config, gpus) or ("" if other is None else gpu_refusal(other, gpus))
    log.info(placement_message(refusal))
    try:
        return with_device(config, refusal), None if other is None else with_device(other, refusal)
    except ConfigError as error:
        exit_refused(error, prog)
