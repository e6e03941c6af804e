"""The one entry point of both workers: reads the settings, pins the cores, and runs the process until SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from common.config import AUTO, DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig, counterpart, exit_refused, load
from common.errors import ConfigError
from common.machine import find_gpus_here, gpu_refusal, placement_message, with_device
from common.observe import setup_logging
from common.wire import Role

if TYPE_CHECKING:
    from common.engine.worker.duty import DutyOffer
    from common.engine.worker.process import WorkerProcess

log = logging.getLogger(__name__)
C = TypeVar("C", bound=WorkerConfig)
Other = TypeVar("Other", bound=WorkerConfig)
Build: TypeAlias = "Callable[[DutyOffer, DutyOffer | None], WorkerProcess]"
"""Makes the process of its role and of the role to which it may change."""

SETTINGS: Mapping[Role, type[WorkerConfig]] = {"prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}
DUTIES: Mapping[Role, str] = {
    "prefill": "prefill_worker.duty:prefill_offer",
    "decode": "decode_worker.duty:decode_offer",
}
"""Where the duty of each role is found. A worker may change between them, and neither package imports the other."""


def make_process(home: DutyOffer, other: DutyOffer | None) -> WorkerProcess:
    """The process of a worker."""
    from common.engine.worker.process import WorkerProcess

    return WorkerProcess(home) if other is None else WorkerProcess(home, other)


def run_role(role: Role, argv: Sequence[str], build: Build = make_process) -> int:
    """Run a worker of `role` until SIGTERM: 0 after a clean end, 2 when settings or model are refused."""
    away: Role = "decode" if role == "prefill" else "prefill"

    def offer(of: Role, config: WorkerConfig) -> DutyOffer:
        made: DutyOffer = resolve_name(DUTIES[of])(config)  # imports torch
        return made

    return run_command(
        argv,
        SETTINGS[role],
        SETTINGS[away],
        role,
        lambda config, other: build(offer(role, config), None if other is None else offer(away, other)),
    )


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
    from common.machine import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    if config.device == AUTO:
        config, other = _on_found_device(config, other, prog)
    from common.engine.worker.process import run_worker

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
