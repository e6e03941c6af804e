"""Identity and status of a worker: hellos and heartbeats for routers, probe results."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, replace

from common import __version__
from common.config import WorkerConfig
from common.engine.worker.contract import Engine, EngineStatus, ModelFacts
from common.engine.worker.probes import ProbeStatus
from common.engine.worker.step_times import LONGEST_S
from common.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AdapterState,
    ServingState,
    WorkerHeartbeat,
    WorkerHello,
)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of a process in its current role. `home`: initial role. `epoch` is new for each role."""

    worker_id: str
    role: str
    home: str
    epoch: int

    @classmethod
    def create(cls, role: str, configured: str) -> WorkerIdentity:
        name = configured or f"{role}-{socket.gethostname()}-{os.getpid()}"
        return cls(name, role, role, _new_epoch())

    def renewed(self, role: str) -> WorkerIdentity:
        """Return the identity of the same process in another role."""
        return replace(self, role=role, epoch=max(_new_epoch(), self.epoch + 1))


def _new_epoch() -> int:
    return time.time_ns() // 1000 * 1000 + secrets.randbelow(1000)


def hello_of(
    identity: WorkerIdentity,
    config: WorkerConfig,
    facts: ModelFacts | None,
    kv_address: str,
    lend_address: str,
    *,
    changes_role: bool = False,
    weight_version: str = "",
) -> WorkerHello:
    """Create a hello. `config`: settings of the current role. `facts` is None while the model is loading."""
    if facts is not None:
        max_num_seqs = facts.max_num_seqs or config.places_within(facts.num_blocks * facts.block_size)
    else:
        max_num_seqs = config.places
    return WorkerHello(
        worker_id=identity.worker_id,
        role=identity.role,
        epoch=identity.epoch,
        fingerprint=facts.fingerprint if facts else "loading",
        model=facts.model_id if facts else config.model,
        block_size=facts.block_size if facts else config.block_tokens,
        num_blocks=facts.num_blocks if facts else 0,
        max_model_len=facts.max_model_len if facts else 0,
        max_num_seqs=max_num_seqs,
        kv_address=kv_address,
        version=__version__,
        weights=facts.weights if facts else "",
        max_step_tokens=(facts.max_step_tokens if facts else 0) or config.step_tokens,
        home=identity.home,
        changes_role=changes_role,
        max_loras=config.lora_places,
        lend_address=lend_address,
        window=facts.window if facts else 0,
        oldest_protocol=OLDEST_PROTOCOL_VERSION,
        protocol=PROTOCOL_VERSION,
        layout=facts.layout if facts else (),
        memory_bytes=facts.memory_bytes if facts else 0,
        weight_version=weight_version,
        hands_over=facts is None or facts.hands_over,
    )


def heartbeat_of(
    identity: WorkerIdentity,
    engine: Engine | None,
    status: EngineStatus,
    router: bytes,
    block_sequence: int,
    *,
    draining: bool,
    planner: str = "",
    adapters: tuple[AdapterState, ...] = (),
    serving: ServingState | None = None,
) -> WorkerHeartbeat:
    """Create a heartbeat for a router. `engine` is None while the model is loading and during a role change."""
    return WorkerHeartbeat(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        step=engine.num_steps if engine else 0,
        ready=engine is not None and engine.alive,
        draining=draining,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_transferring=status.num_transferring,
        num_waiting_tokens=status.num_waiting_tokens,
        num_free_blocks=status.blocks.free,
        num_cached_blocks=status.blocks.cached,
        num_owned_blocks=status.blocks.owned,
        tokens_per_s=status.tokens_per_s,
        step_time_s=status.step_time_s,
        full_tokens_per_s=status.full_tokens_per_s,
        turn_limit_s=engine.turn_limit_s if engine else LONGEST_S,
        waiting_s=status.waiting_left_s(time.monotonic()),
        num_context_tokens=status.num_context_tokens,
        step_model=status.step_model,
        serial=status.serials.get(router, 0),
        block_sequence=block_sequence,
        batch_cap=status.batch_cap,
        step_tokens=status.step_tokens,
        planner=planner,
        links=status.links,
        adapters=adapters,
        serving=serving,
    )


def probe_of(identity: WorkerIdentity, engine: Engine | None, *, draining: bool, condition: str = "") -> ProbeStatus:
    """Return the probe status: healthy while the engine loop runs, ready when requests may be sent.

    `condition` describes a worker that routers have paused or put to sleep.
    """
    if engine is None:
        state = condition or ("changing role" if draining else "loading")
        return ProbeStatus(ready=False, healthy=True, detail={"state": state})
    healthy = engine.alive and not engine.is_stuck(time.monotonic())
    blocks = engine.status.blocks
    detail: dict[str, object] = {
        "state": (condition or "draining") if draining else "ready" if healthy else "stuck",
        "worker_id": identity.worker_id,
        "blocks": {"free": blocks.free, "cached": blocks.cached, "owned": blocks.owned},
    }
    return ProbeStatus(ready=healthy and not draining, healthy=healthy, detail=detail)
