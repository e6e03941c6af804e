"""Routers learn from workers which blocks these cache, also those that came with other routers' requests."""

from __future__ import annotations

from typing import Any

import pytest

from common.blocks.block_hash import block_hashes
from common.engine.kv.block_log import BlockLog
from common.wire.messages import BlockSnapshotRequest, DecodeRequest, PrefillRequest
from router.dispatch.dispatcher import Dispatcher
from router.fleet import prefix_index

PROMPT = list(range(100, 140))
HASHES = block_hashes(PROMPT, 4)


def num_hits(dispatcher: Any, worker: Any, hashes: list[bytes] = HASHES) -> int:
    blocks: int = dispatcher.fleet.index.hits(hashes).num_blocks(worker.address)
    return blocks


def logs(worker: Any) -> BlockLog:
    """A log of what the worker caches; `tell` it."""
    worker.log = BlockLog(worker.epoch)
    return worker.log  # type: ignore[no-any-return]


def tell(worker: Any) -> None:
    """Send what changed to every router, as before a heartbeat."""
    for event in worker.log.take():
        for router in worker.routers:
            worker.send(router, event)
    worker.beat = {"block_sequence": worker.log.sequence}


async def test_a_router_uses_what_another_had_a_worker_cache(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(1, 2)
    worker = cluster.decode[1]
    log = logs(worker)
    for digest in HASHES:
        log.stored(digest)
    tell(worker)
    await tools.until(lambda: num_hits(dispatcher, worker) == len(HASHES))
    await tools.collect(dispatcher, tools.request(PROMPT))
    assert not cluster.prefill[0].of(PrefillRequest), "the decode worker has all but the last token"
    assert worker.of(DecodeRequest) and not cluster.decode[0].of(DecodeRequest)
    log.removed(HASHES[2])
    tell(worker)
    await tools.until(lambda: num_hits(dispatcher, worker) == 2)


async def test_a_new_router_asks_for_a_snapshot(cluster: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "ASK_AGAIN_S", 3600.0)
    first = await cluster.start(0, 1)
    (worker,) = cluster.decode
    log = logs(worker)
    for digest in HASHES:
        log.stored(digest)
    tell(worker)
    await tools.until(lambda: num_hits(first, worker) == len(HASHES))
    second = Dispatcher(cluster.config())
    await second.start()
    try:
        await tools.until(lambda: worker.of(BlockSnapshotRequest))
        assert num_hits(second, worker) == 0
        for router in worker.routers:
            for piece in log.snapshot():
                worker.send(router, piece)
        await tools.until(lambda: num_hits(second, worker) == len(HASHES))
        assert num_hits(first, worker) == len(HASHES), "a snapshot that it did not ask for does no harm"
        assert len(worker.of(BlockSnapshotRequest)) == 1
    finally:
        await second.close()


async def test_a_restarted_worker_holds_nothing(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(0, 1)
    (worker,) = cluster.decode
    logs(worker).stored(HASHES[0])
    tell(worker)
    await tools.until(lambda: num_hits(dispatcher, worker) == 1)
    worker.die()
    worker.beat = {}
    await worker.restart()
    await tools.until(lambda: dispatcher.fleet.registry.workers[worker.address].life.known_epoch == worker.epoch)
    assert num_hits(dispatcher, worker) == 0


async def test_what_was_sent_counts_until_the_worker_reports(cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(1, 1)
    await tools.collect(dispatcher, tools.request(PROMPT))
    for worker in (*cluster.prefill, *cluster.decode):
        assert num_hits(dispatcher, worker) == len(HASHES)
    now = dispatcher._clock()
    dispatcher.fleet.index.expire(now + 31.0)
    for worker in (*cluster.prefill, *cluster.decode):
        assert num_hits(dispatcher, worker) == 0
