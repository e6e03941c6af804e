"""What a worker does for as long as it has one role: a KV socket and an engine, over a model that outlasts it.

A worker process has a duty at a time. To change its role it ends one duty and takes up another, over the same weights
and KV memory (docs/decisions/0030-roles-without-restart.md).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockLog, BlockPool
from common.engine.transfer import (
    Frames,
    KVLender,
    KVPuller,
    KVSender,
    Lendable,
    LenderIdentity,
    PeerCaches,
    TransferEnded,
    Transport,
    blocks_in_queues,
    new_transport,
)
from common.engine.worker.engine import Engine, EngineConfig, Send
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.vitals import WorkerIdentity
from common.model_files import ModelFiles
from common.wire import Curve, Role

if TYPE_CHECKING:
    from common.engine.kv.tiers import BlockTiers, ReadEnded
    from common.engine.run import LoadedModel
    from common.grammar import Grammars

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a duty gets from its process. `identity` is of this duty alone: each has an epoch of its own."""

    identity: WorkerIdentity
    context: zmq.Context[zmq.Socket[bytes]]
    curve: Curve | None
    metrics: WorkerMetrics


class Duty(ABC):
    """One term of a role. The process calls `bind`, then `build_engine`, or `close_kv` if no engine was built."""

    role: ClassVar[Role]

    def __init__(self, config: WorkerConfig, parts: WorkerParts) -> None:
        self.config, self.parts = config, parts
        self.block_log = BlockLog(parts.identity.epoch)
        """What the prefix cache holds; it begins empty, as the pool of each duty does."""
        self.transport: Transport
        """How KV travels, from `bind` on."""
        self._tiers: BlockTiers | None = None
        self._lender: KVLender | None = None
        self._puller: KVPuller | None = None

    def bind(self) -> str:
        """Bind the sockets for KV, and return the address of `bind_kv`.

        Raises zmq.ZMQError for a taken port, ConfigError when the KV transport does not work here.
        """
        config = self.config
        self.transport = new_transport(config, self.parts.identity.worker_id)
        address = self.bind_kv()
        try:
            if config.enable_prefix_caching:
                self._lender = KVLender(self.parts.context, config.host, config.lend_port, self.parts.curve)
        except zmq.ZMQError:
            self.close_kv()
            raise
        return address

    @property
    def lend_address(self) -> str:
        """Where others copy cached blocks; "": they do not."""
        return self._lender.address if self._lender is not None else ""

    def bind_kv(self) -> str:
        """Bind the socket that transfers arrive on, if this role has one. Raises zmq.ZMQError."""
        return ""

    def close_kv(self) -> None:
        """Close what `bind` bound and the tiers, when no engine took them over."""
        if self._lender is not None:
            self._lender.stop()
        if self._puller is not None:
            self._puller.stop()
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
        """The tiers below the prefix cache, started; None without. Raises ConfigError or OSError.

        Called before any socket is made that only the engine would close.
        """
        from common.engine.kv.tiers import open_tiers

        self._tiers = open_tiers(self.config, loaded.kv, loaded.fingerprint, pool, notify)
        if self._tiers is not None:
            self._tiers.start()
        return self._tiers

    def new_peers(self, loaded: LoadedModel, pool: BlockPool, notify: Callable[[ReadEnded], None]) -> PeerCaches | None:
        """Takes blocks from the caches of others and lends those of this worker, started; None without.

        Called after `new_tiers`. The engine closes it.
        """
        if (lender := self._lender) is None:
            return None
        from common.engine.kv import outgoing_blocks
        from common.engine.kv.tiers import copied_incoming

        identity, kv = self.parts.identity, loaded.kv
        offer, transport = self.transport.pulls(kv)
        puller = self._puller = KVPuller(
            self.parts.context,
            loaded.fingerprint,
            kv.wire_bytes,
            copied_incoming(kv),
            notify,
            transport=transport,
            required=self.transport.name if self.transport.is_required else "",
            curve=self.parts.curve,
        )
        lender.start(
            LenderIdentity(identity.worker_id, identity.epoch, loaded.fingerprint, offer),
            Lendable(pool, outgoing_blocks(kv, blocks_in_queues(kv.wire_bytes)), kv.wire_bytes, self._tiers),
        )
        puller.start()
        return PeerCaches(lender, puller)

    def new_sender(
        self,
        loaded: LoadedModel,
        on_ended: Callable[[TransferEnded], None],
        quantise: Callable[[Sequence[int]], Sequence[memoryview]] | None = None,
        **options: Any,
    ) -> KVSender:
        """Ships blocks of this worker's cache; `options` are the settings of `KVSender` that differ by role.

        Raises ConfigError where other workers have to read this one's memory, and cannot.
        """
        # Imported here: it imports torch, as the model has by now.
        from common.engine.kv import GatheredOutgoing, outgoing_blocks

        identity, kv = self.parts.identity, loaded.kv
        blocks = outgoing_blocks(kv, blocks_in_queues(kv.wire_bytes))
        frames = Frames(blocks.view, blocks.views if isinstance(blocks, GatheredOutgoing) else None, quantise)
        return KVSender(
            self.parts.context,
            frames,
            self.transport.outgoing(kv, blocks, frames),
            kv.wire_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            on_ended,
            curve=self.parts.curve,
            **options,
        )


@dataclass(frozen=True, slots=True)
class DutyOffer:
    """A role that a process may have: its settings, and what begins a duty of it."""

    role: Role
    config: WorkerConfig
    begin: Callable[[WorkerParts], Duty]
