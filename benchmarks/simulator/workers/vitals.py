"""What workers say of themselves: hello and heartbeat. It models `common/engine/worker/vitals.py`."""

from __future__ import annotations

from typing import Any, Protocol

from benchmarks.simulator.workers.process import Process
from benchmarks.simulator.world.scenario import PoolSpec
from benchmarks.simulator.world.world import World
from common import __version__
from common.config import WorkerConfig
from common.engine.kv.block_log import BlockLog
from common.engine.sequences.scheduler import Scheduler
from common.latency.step_model import StepModel, StepShape
from common.wire.message_fields import Role
from common.wire.messages import WorkerHeartbeat, WorkerHello

NEVER_S = 1e9
"""Simulated engines do not get stuck."""
FINGERPRINT = "simulated"


class Reporting(Protocol):
    """A worker, as far as it tells of itself."""

    world: World
    process: Process[Any]
    pool: PoolSpec
    name: str
    address: str
    role: Role
    epoch: int
    num_steps: int
    is_closed: bool
    drains_since: float | None
    published_at: float
    block_log: BlockLog

    @property
    def settings(self) -> WorkerConfig:
        """Its process's settings."""

    @property
    def scheduler(self) -> Scheduler[Any]:
        """Production's."""

    @property
    def model(self) -> StepModel:
        """What the worker knows of its steps."""

    def beside(self) -> StepShape:
        """What steps compute beside prompts."""

    def grown(self) -> tuple[int, int]:
        """Blocks and tokens that running sequences have gained since they were last counted."""


def hello_of(worker: Reporting) -> WorkerHello:
    """Who it is, in its present role."""
    model = worker.world.scenario.model
    return WorkerHello(
        worker_id=worker.name,
        role=worker.role,
        epoch=worker.epoch,
        fingerprint=FINGERPRINT,
        model=FINGERPRINT,
        block_size=model.block_size,
        num_blocks=worker.pool.num_blocks,
        max_model_len=model.max_model_len,
        max_num_seqs=worker.settings.places,
        kv_address=worker.address if worker.role == "decode" else "",
        version=__version__,
        weights=FINGERPRINT,
        max_step_tokens=worker.settings.step_tokens,
        window=model.window,
        home=worker.process.home.role,
        changes_role=worker.process.home.other_role is not None,
    )


def heartbeat_of(worker: Reporting) -> WorkerHeartbeat:
    """What every router hears."""
    scheduler, step_tokens = worker.scheduler, worker.scheduler.max_step_tokens
    model = worker.model if worker.world.scenario.reports_steps else StepModel()
    waiting, counts = scheduler.waiting_shape, scheduler.pool.counts
    num_more, more_context = worker.grown()
    num_taken = min(num_more, counts.free + counts.cached)
    waiting_s = model.steps_s(waiting, step_tokens, worker.beside()) if waiting.num_tokens else 0.0
    return WorkerHeartbeat(
        worker_id=worker.name,
        epoch=worker.epoch,
        step=worker.num_steps,
        ready=not worker.is_closed,
        draining=worker.drains_since is not None,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_transferring=scheduler.num_in_transfer,
        num_waiting_tokens=waiting.num_tokens,
        num_free_blocks=max(0, counts.free - num_taken),
        num_cached_blocks=counts.cached - max(0, num_taken - counts.free),
        num_owned_blocks=counts.owned + num_taken,
        turn_limit_s=NEVER_S,
        waiting_s=max(0.0, waiting_s - (worker.world.clock.now - worker.published_at)),
        num_context_tokens=scheduler.num_context_tokens + more_context,
        step_model=model,
        block_sequence=worker.block_log.sequence,
        batch_cap=scheduler.batch_cap.value,
        step_tokens=step_tokens,
        planner=worker.process.planner,
    )
