"""Lends cached blocks to other workers, on a dedicated thread, so that pulls do not wait for engine steps.

The lender owns no blocks and does not prevent evictions. It looks up a block by hash, computes its checksum and checks
that the cache still has it under that hash, which proves that the block was not overwritten. If a block is evicted
later, while a frame points to it or a puller copies it, the puller detects a checksum mismatch and recomputes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import zmq

from common.engine.kv import BlockPool, checksum
from common.engine.kv.tiers import BlockTiers
from common.engine.transfer.frames import blocks_per_message
from common.engine.transfer.mailbox import Mailbox
from common.errors import WireError
from common.wire import Curve, DropLog, bind, decode, encode
from common.wire.messages import BLOCK_HASH_BYTES, KVAck, KVBlocks, KVFailed, KVOffer, KVOpen, KVPull, Message

if TYPE_CHECKING:
    from common.engine.kv import OutgoingBlocks

log = logging.getLogger(__name__)
MAX_LENT = 16
"""Maximum number of concurrent pulls. Others are refused."""
LEASE_S = 2.0
"""A pull that requests nothing for this time, in seconds, loses its slot."""
LEND_HWM = 64
"""Messages that ZeroMQ queues per puller: more than it requests at once (`puller.py`). Others are dropped."""
PULLS_HWM = 256
"""Unread messages that ZeroMQ queues per puller."""


@dataclass(frozen=True, slots=True)
class LentBlock:
    """Bytes of a block. `source` is its index in the shared cache; None for a copy."""

    block_hash: bytes
    view: memoryview
    source: int | None


class LendableBlocks:
    """Source of the blocks to lend. Used only by the lender's thread. `outgoing` provides views of cached blocks."""

    def __init__(
        self, pool: BlockPool, outgoing: OutgoingBlocks, block_bytes: int, tiers: BlockTiers | None = None
    ) -> None:
        self._pool, self._outgoing, self._tiers = pool, outgoing, tiers
        self.block_bytes, self.num_blocks = block_bytes, pool.num_blocks

    def find(self, block_hash: bytes) -> LentBlock | None:
        """Return the block, or None. A cached block may change at any time: check `is_unchanged` after reading it."""
        if (block := self._pool.find(block_hash)) is not None:
            return LentBlock(block_hash, self._outgoing.view(block), block)
        copy = self._tiers.copy_of(block_hash) if self._tiers is not None else None
        return LentBlock(block_hash, copy, None) if copy is not None else None

    def is_unchanged(self, block: LentBlock) -> bool:
        """Return whether the block is unchanged since `find`."""
        return block.source is None or self._pool.is_published(block.source, block.block_hash)


@dataclass(frozen=True, slots=True)
class LenderIdentity:
    """Identity of the lender in offers to pullers. `offer` lets them copy blocks out of shared memory."""

    worker_id: str
    epoch: int
    fingerprint: str
    offer: KVOffer | None = None


class KVLender:
    """Serves pulls. `start` and `stop` must be called by the engine thread, or before it runs."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, curve: Curve | None = None
    ) -> None:
        """Binds its socket. Raises zmq.ZMQError if the port is in use."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, LEND_HWM)
        self._socket.set(zmq.RCVHWM, PULLS_HWM)
        self._socket.set(zmq.MAXMSGSIZE, 64 * 1024)
        try:
            self.address = bind(self._socket, host, port, curve)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._stop: Mailbox[None] = Mailbox(context)
        self._places: OrderedDict[tuple[bytes, str, int], float] = OrderedDict()  # least recently used first
        self._drops = DropLog(log, "a pull")
        self._identity: LenderIdentity
        self._blocks: LendableBlocks
        self._batch = 1
        self._has_stopped = False
        self.num_lent_blocks = self.num_refused = 0
        self._thread = threading.Thread(target=self._main, name="kv-lender", daemon=True)

    def start(self, identity: LenderIdentity, blocks: LendableBlocks) -> None:
        """Start lending `blocks`."""
        self._identity, self._blocks = identity, blocks
        self._batch = blocks_per_message(blocks.block_bytes)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread if it runs, and close the sockets. Idempotent."""
        if self._has_stopped:
            return
        self._has_stopped = True
        if self._thread.ident is None:
            self._socket.close()
            self._stop.close_sending()
            self._stop.close()
            return
        self._stop.put(None)
        self._thread.join(timeout_s)
        self._stop.close_sending()

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop.socket, zmq.POLLIN)
        try:
            while not self._stop.is_waiting:
                ready = dict(poller.poll(1000))
                now = time.monotonic()
                if self._socket in ready:
                    self._receive(now)
                self._drops.flush(now)
        except Exception:  # whatever the error: the worker continues, and pullers recompute
            log.exception("KV lender died: other workers cannot copy cached blocks from this worker until it restarts")
        finally:
            self._socket.close()
            self._stop.close()

    def _receive(self, now: float) -> None:
        peer, *parts = self._socket.recv_multipart()
        try:
            if len(parts) != 1:
                raise WireError(f"{len(parts)} parts instead of 1")
            message = decode(parts[0])
        except WireError as error:
            self._drops.add(str(error), now)
            return
        match message:
            case KVPull():
                self._answer(peer, message, now)
            case KVAck(request_id=request_id, attempt=attempt):
                self._places.pop((peer, request_id, attempt), None)
            case _:
                self._drops.add(f"unexpected {type(message).__name__}", now)

    def _answer(self, peer: bytes, pull: KVPull, now: float) -> None:
        me = self._identity
        if pull.epoch != me.epoch or pull.fingerprint != me.fingerprint:
            why = f"wrong epoch or layout: requested {pull.epoch}, {pull.fingerprint}"
            self._drops.add(f"{why}; this worker has {me.epoch}, {me.fingerprint}", now)  # not for strangers
            self._refuse(peer, pull, why)
        elif len(pull.hashes) % BLOCK_HASH_BYTES:
            self._refuse(peer, pull, f"invalid hashes: {len(pull.hashes)} bytes, not a multiple of {BLOCK_HASH_BYTES}")
        elif not self._take_place((peer, pull.request_id, pull.attempt), now):
            self._refuse(peer, pull, f"too many concurrent pulls (limit {MAX_LENT})")
        elif not pull.hashes:
            self._send(peer, self._offer(pull))
        else:
            self._lend(peer, pull)

    def _take_place(self, key: tuple[bytes, str, int], now: float) -> bool:
        """Allocate or renew a pull's slot; False if all slots are in use."""
        while self._places and next(iter(self._places.values())) < now - LEASE_S:
            self._places.popitem(last=False)
        if key not in self._places and len(self._places) >= MAX_LENT:
            return False
        self._places[key] = now
        self._places.move_to_end(key)
        return True

    def _offer(self, pull: KVPull) -> KVOpen:
        me = self._identity
        return KVOpen(
            request_id=pull.request_id,
            attempt=pull.attempt,
            worker_id=me.worker_id,
            epoch=me.epoch,
            decode_epoch=0,
            fingerprint=me.fingerprint,
            num_blocks=max(1, self._blocks.num_blocks),
            sent_at=time.monotonic(),
            offer=me.offer,
        )

    def _lend(self, peer: bytes, pull: KVPull) -> None:
        """Send the leading blocks of the chain that are cached, grouped into messages by transport."""
        size = BLOCK_HASH_BYTES
        hashes = [pull.hashes[begin : begin + size] for begin in range(0, len(pull.hashes), size)]
        first, num_sent = pull.first_block, 0
        for batch in (hashes[begin : begin + self._batch] for begin in range(0, len(hashes), self._batch)):
            found = list(self._found(batch))
            for is_shared, group in groupby(found, lambda one: pull.shared and one[0].source is not None):
                self._send_blocks(peer, pull, first + num_sent, list(group), is_shared=is_shared)
            num_sent += len(found)
            self.num_lent_blocks += len(found)
            if len(found) < len(batch):
                self._refuse(peer, pull, f"block {first + num_sent} is not cached")
                return

    def _found(self, hashes: Sequence[bytes]) -> Iterator[tuple[LentBlock, int]]:
        """Yield the leading blocks of a chain, each with its checksum."""
        for block_hash in hashes:
            block = self._blocks.find(block_hash)
            if block is None:
                return
            seal = checksum(block.view)
            if not self._blocks.is_unchanged(block):
                return  # it may have been overwritten while the checksum was computed
            yield block, seal

    def _send_blocks(
        self, peer: bytes, pull: KVPull, first: int, found: Sequence[tuple[LentBlock, int]], *, is_shared: bool
    ) -> None:
        header = KVBlocks(
            request_id=pull.request_id,
            attempt=pull.attempt,
            first_block=first,
            checksums=tuple(seal for _, seal in found),
            sources=tuple(block.source for block, _ in found if block.source is not None) if is_shared else (),
            token=pull.token,
        )
        frames = [] if is_shared else [block.view for block, _ in found]
        # ROUTER drops messages to a puller that has disconnected or does not read. Such a puller times out.
        self._socket.send_multipart([peer, encode(header), *frames], copy=False)

    def _refuse(self, peer: bytes, pull: KVPull, why: str) -> None:
        self.num_refused += 1
        self._send(peer, KVFailed(request_id=pull.request_id, attempt=pull.attempt, reason=why[:1000]))

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encode(message)])
