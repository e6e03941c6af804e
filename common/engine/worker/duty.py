"""Base class of our roles: KV sockets and an engine, over a model that outlives them.

A worker process has one role at a time. To change it, the process stops one and starts another with the same weights
and KV memory (docs/decisions/0030-roles-without-restart.md).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockLog, BlockPool
from common.engine.transfer import (
    Frames,
    KVLender,
    KVPuller,
    KVSender,
    LendableBlocks,
    LenderIdentity,
    PeerCaches,
    TransferEnded,
    Transport,
    blocks_in_queues,
    new_transport,
)
from common.engine.worker.contract import Send, WorkerParts
from common.engine.worker.loop import EngineConfig, EngineLoop
from common.model_files import ModelFiles
from common.wire import Role

if TYPE_CHECKING:
    from common.engine.kv.tiers import BlockTiers, ReadEnded
    from common.engine.run import LoadedModel
    from common.engine.worker.loop_model import LoopModel
    from common.grammar import Grammars

log = logging.getLogger(__name__)


class LoopDuty(ABC):
    """Our `Duty`. Subclasses create the scheduler, KV transfers and engine of a role."""

    role: ClassVar[Role]

    def __init__(self, config: WorkerConfig, parts: WorkerParts) -> None:
        self.config, self.parts = config, parts
        self.block_log = BlockLog(parts.identity.epoch)
        """Log of the prefix cache, which is empty at the start of each role."""
        self.transport: Transport
        """KV transport, set by `bind`."""
        self.kv_address = ""
        self._tiers: BlockTiers | None = None
        self._lender: KVLender | None = None
        self._puller: KVPuller | None = None
        self._sender: KVSender | None = None

    def bind(self) -> None:
        """Bind the KV sockets.

        Raises zmq.ZMQError if a port is in use, ConfigError if the KV transport is unavailable.
        """
        config = self.config
        self.transport = new_transport(
            config.kv_transport, self.parts.identity.worker_id, device_index=config.device_index
        )
        self.kv_address = self.bind_kv()
        try:
            if config.enable_prefix_caching:
                self._lender = KVLender(self.parts.context, config.host, config.lend_port, self.parts.curve)
        except zmq.ZMQError:
            self.close_kv()
            raise

    @property
    def lend_address(self) -> str:
        """Address from which others copy cached blocks; "" if they cannot."""
        return self._lender.address if self._lender is not None else ""

    def bind_kv(self) -> str:
        """Bind the socket that receives transfers, if this role has one. Returns its address. Raises zmq.ZMQError."""
        return ""

    def close_kv(self) -> None:
        """Close the sockets of `bind` and the tiers if no engine took ownership."""
        if self._lender is not None:
            self._lender.stop()
        for transfers in (self._puller, self._sender):
            if transfers is not None:
                transfers.stop()
        if self._tiers is not None:
            self._tiers.close()

    def build_engine(self, model: LoopModel, send: Send) -> EngineLoop:
        """Create the engine without starting it."""
        grammars = model.grammars.shared()
        try:
            engine = self.new_engine(model.files, model.loaded, grammars, send)
        except BaseException:
            grammars.close()
            raise
        model.prepare(engine, self.config, self.role)
        return engine

    @abstractmethod
    def new_engine(self, files: ModelFiles, loaded: LoadedModel, grammars: Grammars, send: Send) -> EngineLoop:
        """Create the engine. It closes `grammars`."""

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
        """Create and start the tiers below the prefix cache; None if not configured. Raises ConfigError or OSError.

        Must be called before anything that is costly or that only the engine closes: it is retried after an InUseError.
        """
        from common.engine.kv.tiers import open_tiers

        self._tiers = open_tiers(self.config, loaded.kv, loaded.fingerprint, pool, notify)
        if self._tiers is not None:
            self._tiers.start()
        return self._tiers

    def new_peers(self, loaded: LoadedModel, pool: BlockPool, notify: Callable[[ReadEnded], None]) -> PeerCaches | None:
        """Create and start the lender and puller of cached blocks; None if disabled.

        Must be called after `new_tiers`. The engine closes them.
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
            LendableBlocks(pool, outgoing_blocks(kv, blocks_in_queues(kv.wire_bytes)), kv.wire_bytes, self._tiers),
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
        """Create the sender of this worker's blocks. `options`: arguments of `KVSender` that differ by role.

        Raises ConfigError if the transport requires shared memory and it is unavailable.
        """
        # Imported late because it imports torch, which the model has loaded by now.
        from common.engine.kv import GatheredOutgoing, outgoing_blocks

        identity, kv = self.parts.identity, loaded.kv
        blocks = outgoing_blocks(kv, blocks_in_queues(kv.wire_bytes))
        frames = Frames(blocks.view, blocks.views if isinstance(blocks, GatheredOutgoing) else None, quantise)
        self._sender = KVSender(
            self.parts.context,
            frames,
            self.transport.outgoing(kv, blocks, frames),
            kv.wire_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            on_ended,
            curve=self.parts.curve,
            **options,
        )
        return self._sender
