"""The worker processes of a cluster around a model of the benchmark's own, with the flags that a worker has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.worker.command import run_command
from common.worker.duty import DutyOffer
from common.worker.process import WorkerProcess
from decode_worker.duty import decode_offer
from prefill_worker.duty import prefill_offer

Build: TypeAlias = Callable[[DutyOffer, DutyOffer | None], WorkerProcess]
"""Makes the process from its home role, and the role to which a router may change it."""


def run_role(role: str, flags: Sequence[str], build: Build) -> int:
    """Run a "prefill" or "decode" worker until SIGTERM; the exit status as of `run_command`."""
    if role == "prefill":
        return run_command(
            flags,
            PrefillWorkerConfig,
            DecodeWorkerConfig,
            "prefill",
            lambda home, other: build(prefill_offer(home), decode_offer(other) if other else None),
        )
    return run_command(
        flags,
        DecodeWorkerConfig,
        PrefillWorkerConfig,
        "decode",
        lambda home, other: build(decode_offer(home), prefill_offer(other) if other else None),
    )
