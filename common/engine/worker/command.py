"""Entry point of both worker commands: reads the settings, pins cores and runs the process until SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias

from common.config import AUTO, DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig, counterpart, exit_refused, load
from common.errors import ConfigError
from common.machine import find_gpus_here, gpu_refusal, placement_message, with_device
from common.observe import setup_logging
from common.wire import Role

if TYPE_CHECKING:
    from common.engine.worker.contract import DutyOffer
    from common.engine.worker.process import WorkerProcess

log = logging.getLogger(__name__)
Build: TypeAlias = "Callable[[DutyOffer[Any], DutyOffer[Any] | None], WorkerProcess]"
"""Creates a worker process from its role and the role to which it may change."""

SETTINGS: Mapping[Role, type[WorkerConfig]] = {"prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}
DUTIES: Mapping[Role, str] = {
    "prefill": "prefill_worker.duty:prefill_offer",
    "decode": "decode_worker.duty:decode_offer",
}
"""Location of each role's implementation. The two packages do not import each other."""
VLLM_OFFER, VLLM_ENVIRONMENT = "common.engine.vllm:vllm_offer", "common.engine.vllm:prepare_environment"
"""Location of both roles' implementation with vLLM, and of the function that sets its environment variables."""


def make_process(home: DutyOffer[Any], other: DutyOffer[Any] | None) -> WorkerProcess:
    """Create a worker process."""
    from common.engine.worker.process import WorkerProcess

    return WorkerProcess(home, other)


def run_role(role: Role, argv: Sequence[str], build: Build = make_process) -> int:
    """Run a worker of `role` until SIGTERM. Returns 0 after a clean exit, 2 if the settings or model are invalid."""
    away: Role = "decode" if role == "prefill" else "prefill"
    prog = f"diptych {role}-worker"
    config = load(SETTINGS[role], argv, prog=prog)
    try:
        other = counterpart(config, SETTINGS[away]) if config.role_change else None
    except ConfigError as error:
        exit_refused(error, prog)
    setup_logging(config.worker_id or role, config.log_level, json=config.log_json)
    # Imported late: --help and invalid settings need no torch, and `spin_briefly` must run before its import.
    from common.machine import pin_to_cores, spin_briefly

    pin_to_cores(config.cores)
    spin_briefly()
    if config.device == AUTO:
        config, other = _on_found_device(config, other, prog)
    if config.engine == "vllm":
        resolve_name(VLLM_ENVIRONMENT)(config)
    from common.engine.worker.process import run_worker

    return run_worker(lambda: build(_offer(role, config), None if other is None else _offer(away, other)))


def _offer(role: Role, config: WorkerConfig) -> DutyOffer[Any]:
    if config.engine == "vllm":
        with_vllm: DutyOffer[Any] = resolve_name(VLLM_OFFER)(role, config)
        return with_vllm
    offer: DutyOffer[Any] = resolve_name(DUTIES[role])(config)  # imports torch
    return offer


def _on_found_device(
    config: WorkerConfig, other: WorkerConfig | None, prog: str
) -> tuple[WorkerConfig, WorkerConfig | None]:
    """Resolve `--device auto` in the settings of both roles and log the choice."""
    gpus = find_gpus_here()
    refusal = gpu_refusal(config, gpus) or ("" if other is None else gpu_refusal(other, gpus))
    log.info(placement_message(refusal))
    try:
        return with_device(config, refusal), None if other is None else with_device(other, refusal)
    except ConfigError as error:
        exit_refused(error, prog)
