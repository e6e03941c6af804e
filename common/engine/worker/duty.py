"""What a worker does for as long as it has one role: a KV socket and an engine, over a model that outlasts it.

A worker process has a duty at a time. To change its role it ends one duty and takes up another, over the same weights
and KV memory (docs/decisions/0030-roles-without-restart.md).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from common.config import WorkerConfig
from common.engine.kv import BlockLog, BlockPool, DriverError, driver
from common.engine.transfer import (
    KVLender,
    KVPuller,
    KVSender,
    Lendable,
    LenderIdentity,
    NixlAgent,
    NixlError,
    OfferedMemory,
    PeerCaches,
    Shipping,
    TransferEnded,
    blocks_in_queues,
)
from common.engine.worker.engine import Engine, EngineConfig, Send
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.vitals import WorkerIdentity
from common.errors import ConfigError
from common.model_files import ModelFiles
from common.wire import Curve, Role

if TYPE_CHECKING:
    from common.engine.kv import BlockRing, KVCache, StagedOutgoing
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
        self.nixl: NixlAgent | None = None
        """With `kv_transport` nixl, from `bind` on."""
        self._tiers: BlockTiers | None = None
        self._lender: KVLender | None = None
        self._puller: KVPuller | None = None

    def bind(self) -> str:
        """Bind the sockets for KV, and return the address of `bind_kv`.

        Raises zmq.ZMQError for a taken port, ConfigError when NIXL or CUDA's driver is asked for and does not work.
        """
        config = self.config
        if config.kv_transport == "nixl":
            with nixl_works():  # before weights are read, which may take minutes
                self.nixl = NixlAgent(self.parts.identity.worker_id)
        if config.exports_kv:
            check_driver(config.device_index)
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

        identity, config, kv = self.parts.identity, self.config, loaded.kv
        puller = self._puller = KVPuller(
            self.parts.context,
            loaded.fingerprint,
            kv.wire_bytes,
            copied_incoming(kv),
            notify,
            share=config.maps_memory and not config.on_gpu,
            require_shared=config.kv_transport == "shm",
            curve=self.parts.curve,
        )
        lender.start(
            LenderIdentity(
                identity.worker_id, identity.epoch, loaded.fingerprint, kv.shared.offer if kv.shared else None
            ),
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
        from common.engine.kv import BlocksInPlace, GatheredOutgoing, OfferedDevice, StagedOutgoing, outgoing_blocks

        identity, kv, config = self.parts.identity, loaded.kv, self.config
        outgoing = outgoing_blocks(kv, blocks_in_queues(kv.wire_bytes))
        memory = kv.shared.offer if kv.shared is not None else None
        # A cache that others cannot map, a GPU's or that of several ranks, is copied through places that they can.
        ring = None
        device = OfferedDevice(kv) if kv.exported is not None else None
        if isinstance(outgoing, StagedOutgoing) and config.kv_transport != "tcp" and device is None:
            ring = _ring(outgoing, kv.num_blocks)
        remote = self._offered(kv, ring) if ring is not None or isinstance(outgoing, BlocksInPlace) else None
        require_shared = config.kv_transport == "shm"
        if require_shared and memory is None and ring is None:
            raise ConfigError("kv_transport", "shm", "auto or tcp: this system has no memory to share")
        views = outgoing.views if isinstance(outgoing, GatheredOutgoing) else None
        return KVSender(
            self.parts.context,
            Shipping(outgoing.view, quantise, memory, ring, require_shared, views, remote, device),
            kv.wire_bytes,
            (identity.worker_id, identity.epoch, loaded.fingerprint),
            on_ended,
            curve=self.parts.curve,
            **options,
        )

    def _offered(self, kv: KVCache, ring: BlockRing | None) -> OfferedMemory | None:
        """What others may read with NIXL: the ring, or a cache in host memory; None without NIXL.

        Raises ConfigError.
        """
        if self.nixl is None:
            return None
        region = (kv.tensor.data_ptr(), kv.tensor.nbytes) if ring is None else ring.region
        with nixl_works():
            return OfferedMemory(self.nixl, region, is_ring=ring is not None)


@contextmanager
def nixl_works() -> Iterator[None]:
    """Raises ConfigError when NIXL, which was asked for, is missing or refuses."""
    try:
        yield
    except NixlError as error:
        raise ConfigError("kv_transport", "nixl", f"auto, tcp or shm: {error}") from error


def check_driver(device_index: int) -> None:
    """Raises ConfigError unless the driver can export this GPU's memory."""
    try:
        driver().check(device_index)
    except DriverError as error:
        raise ConfigError("kv_transport", "cuda-ipc", f"auto, tcp or shm: {error}") from error


def _ring(outgoing: StagedOutgoing, num_blocks: int) -> BlockRing | None:
    """Places for blocks in shared memory; None, and frames are sent, where there can be none."""
    from common.engine.kv import NotShared, ring_for

    try:
        return ring_for(outgoing, num_blocks)
    except NotShared as error:
        log.warning("KV goes over TCP to decode workers of this host too: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class DutyOffer:
    """A role that a process may have: its settings, and what begins a duty of it."""

    role: Role
    config: WorkerConfig
    begin: Callable[[WorkerParts], Duty]
