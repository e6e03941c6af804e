"""What a test's engine takes from other caches, and what it lends of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from common.kv.block_pool import BlockPool
from common.kv.cache import KVCache
from common.kv.staging import outgoing_blocks
from common.tiers.block_tiers import BlockTiers
from common.tiers.copies import copied_incoming
from common.transfer.lendable import Lendable
from common.transfer.lender import KVLender, LenderIdentity
from common.transfer.peer_caches import PeerCaches
from common.transfer.puller import KVPuller
from common.wire.messages import KVPeer

LAYOUT = "layout"


def peer_caches(
    context: zmq.Context[zmq.Socket[bytes]],
    kv: KVCache,
    pool: BlockPool,
    notify: Callable[[Any], None],
    identity: tuple[str, int],
    *,
    tiers: BlockTiers | None = None,
    share: bool = True,
) -> PeerCaches:
    """Started; `share`: out of memory, where the caches are shared."""
    lender = KVLender(context, "127.0.0.1", 0)
    puller = KVPuller(context, LAYOUT, kv.block_bytes, copied_incoming(kv), notify, share=share)
    memory = kv.shared.offer if kv.shared is not None else None
    lender.start(LenderIdentity(*identity, LAYOUT, memory), Lendable(pool, outgoing_blocks(kv), kv.block_bytes, tiers))
    puller.start()
    return PeerCaches(lender, puller)


def as_peer(caches: PeerCaches, identity: tuple[str, int], num_blocks: int) -> KVPeer:
    """As a router names it to others."""
    return KVPeer(*identity, caches.lender.address, num_blocks)
