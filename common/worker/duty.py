"""What a worker does for as long as it has one role: a KV socket and an engine, over a model that outlasts it.

A worker process has a duty at a time. To change its role it ends one duty and takes up another, over the same weights
and KV memory (docs/decisions/0030-roles-without-restart.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from common.config import WorkerConfig
from common.kv.block_log import BlockLog
from common.kv.block_pool import BlockPool
from common.model_files.files import ModelFiles
from common.transfer.outgoing import TransferEnded
from common.transfer.sender import KVSender
from common.wire.curve import Curve
from common.wire.message_fields import Role
from common.worker.engine import Engine, EngineConfig, Send
from common.worker.metrics import WorkerMetrics
from common.worker.vitals import WorkerIdentity

if TYPE_CHECKING:
    from common.grammar.grammars import Grammars
    from common.runner.loaded import LoadedModel
    from common.tiers.block_tiers import BlockTiers, ReadEnded


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a duty gets from its process. `identity` is of this duty alone: each has an epoch of its own."""

    identity: WorkerIdentity
    context: zmq.Context[zmq.Socket[bytes]]
    curve: Curve | None
    metrics: WorkerMetrics


class Duty(ABC):
    """One term of a role. The process calls `bind_kv`, then `build_engine`, or `close_kv` if no engine was built."""

    role: ClassVar[Role]

    def __init__(self, config: WorkerConfig, parts: WorkerParts) -> None:
        self.config, self.parts = config, parts
        self.block_log = BlockLog(parts.identity.epoch)
        """What the prefix cache holds; it begins empty, as the pool of each duty does."""
        self._tiers: BlockTiers | None = None

    def bind_kv(self) -> str:
        """Bind the KV socket if this role has one, and return its address; raises zmq.ZMQError for a taken port."""
        return ""

    def close_kv(self) -> None:
        """Close what `bind_kv` bound and the tiers, when no engine took them over."""
        if self._tiers is not None:
            self._tiers.close()

    @abstractmethod
    def build_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> Engine:
        """The engine, not started. It closes `grammars`."""

    def engine_config(self, files: ModelFiles, loaded: LoadedModel) -> EngineConfig:
        identity = self.parts.identity
        return EngineConfig(
            identity=(identity.worker_id, identity.epoch),
            eos_token_ids=files.eos_token_ids,
            max_model_len=loaded.max_model_len,
            max_waiting=self.config.max_waiting,
        )

    def new_pool(self, loaded: LoadedModel) -> BlockPool:
        return BlockPool(
            loaded.kv.num_blocks,
            loaded.kv.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            log=self.block_log,
        )

    def new_tiers(self, loaded: LoadedModel, pool: BlockPool, notify: Callable[[ReadEnded], None]) -> BlockTiers | None:
        """What is below the prefix cache, started; None without. Raises ConfigError or OSError.

        Called before any socket is made that only the engine would close.
        """
        from common.tiers.opened import open_tiers  # which imports torch, as the model has by now

        self._tiers = open_tiers(self.config, loaded.kv, loaded.fingerprint, pool, notify)
        if self._tiers is not None:
            self._tiers.start()
        return self._tiers

    def new_sender(self, loaded: LoadedModel, on_ended: Callable[[TransferEnded], None], **options: Any) -> KVSender:
        """Ships blocks of this worker's cache; `options` are the settings of `KVSender` that differ by role."""
        from common.kv.staging import outgoing_blocks  # which imports torch, as the model has by now

        identity = self.parts.identity
        return KVSender(
            self.parts.context,
            outgoing_blocks(loaded.kv).view,
            loaded.kv.block_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            on_ended,
            memory=loaded.kv.shared.offer if loaded.kv.shared else None,
            require_shared=self.config.kv_transport == "shm",
            curve=self.parts.curve,
            **options,
        )


@dataclass(frozen=True, slots=True)
class DutyOffer:
    """A role that a process may have: its settings, and what begins a duty of it."""

    role: Role
    config: WorkerConfig
    begin: Callable[[WorkerParts], Duty]
