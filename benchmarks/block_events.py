"""What it costs to tell routers what a prefix cache holds: `python -m benchmarks.block_events`.

A worker's block pool runs full: prompts come at `--tokens-per-s`, a part of each is shared with earlier ones, and each
new block evicts an old one. Heartbeats take the changes as messages. Prints, for one worker and one router, bytes a
second on the wire, and microseconds of processor time for a block: in the pool, in messages, in the router's index.
"""

from __future__ import annotations

import argparse
import random
import time

from common.kv.block_hash import block_hashes
from common.kv.block_log import BlockLog
from common.kv.block_pool import BlockPool
from common.wire.codec import decode, encode
from common.wire.messages import BlockEvents, BlockSnapshot
from router.fleet.block_reports import BlockReports
from router.fleet.prefix_index import PrefixIndex

BLOCK_SIZE = 16
HEARTBEAT_S = 0.25
WORKER = "tcp://10.0.0.1:7001"


class Bench:
    """One worker and one router that follows it."""

    def __init__(self, num_blocks: int, seed: int = 1) -> None:
        self.log = BlockLog(epoch=1)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, log=self.log)
        self.index = PrefixIndex()
        self.reports = BlockReports(self.index)
        self.reports.begin(WORKER, 1)
        self.rng = random.Random(seed)
        self.heads = [self._tokens(1024) for _ in range(20)]
        self.num_blocks_told = self.num_bytes = 0
        self.log_s = self.wire_s = self.index_s = 0.0

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(count)]

    def prompt(self, num_tokens: int) -> int:
        """Cache one prompt; how many tokens were computed for it."""
        hashes = block_hashes(self.rng.choice(self.heads) + self._tokens(num_tokens - 1024), BLOCK_SIZE)
        began = time.thread_time()
        hits = self.pool.match(hashes)
        self.pool.acquire(hits)
        blocks = hits + self.pool.allocate(len(hashes) - len(hits))
        self.pool.wrote(blocks, len(hits) * BLOCK_SIZE, len(hashes) * BLOCK_SIZE)
        for block, digest in zip(blocks[len(hits) :], hashes[len(hits) :], strict=True):
            self.pool.publish(block, digest)
        self.pool.release(blocks)
        self.log_s += time.thread_time() - began
        return (len(hashes) - len(hits)) * BLOCK_SIZE

    def heartbeat(self) -> None:
        """Tell the router what changed."""
        began = time.thread_time()
        sent = [encode(event) for event in self.log.take()]
        events = [event for event in map(decode, sent) if isinstance(event, BlockEvents)]
        then = time.thread_time()
        for event in events:
            self.reports.on_events(WORKER, event)
        self.wire_s, self.index_s = self.wire_s + then - began, self.index_s + time.thread_time() - then
        self.num_bytes += sum(map(len, sent))
        self.num_blocks_told += sum((len(event.stored) + len(event.removed)) // 8 for event in events)

    def snapshot(self) -> tuple[int, float]:
        """Tell the router all; bytes, and milliseconds on both sides."""
        began = time.thread_time()
        sent = [encode(piece) for piece in self.log.snapshot()]
        for piece in map(decode, sent):
            if isinstance(piece, BlockSnapshot):
                self.reports.on_snapshot(WORKER, piece)
        return sum(map(len, sent)), 1e3 * (time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--prompt-tokens", type=int, default=2_000)
    parser.add_argument("--num-blocks", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic, not of waiting")
    options = parser.parse_args()
    print("tokens/s  blocks/s  bytes/s   pool us  wire us  index us   (a block)   snapshot: bytes, ms on both sides")
    for rate in options.tokens_per_s:
        bench = Bench(options.num_blocks)
        while bench.pool.counts.free:  # a full cache evicts as much as it stores
            bench.prompt(options.prompt_tokens)
        bench.heartbeat()
        bench.snapshot()
        bench.num_bytes = bench.num_blocks_told = 0
        bench.log_s = bench.wire_s = bench.index_s = 0.0
        computed = 0
        for beat in range(int(options.seconds / HEARTBEAT_S)):
            while computed < rate * HEARTBEAT_S * (beat + 1):
                computed += bench.prompt(options.prompt_tokens)
            bench.heartbeat()
        num, seconds = bench.num_blocks_told, options.seconds
        costs = (1e6 * spent / num for spent in (bench.log_s, bench.wire_s, bench.index_s))
        pool_us, wire_us, index_us = costs
        snapshot_bytes, snapshot_ms = bench.snapshot()
        told = f"{rate:8d} {num / seconds:9.0f} {bench.num_bytes / seconds:8.0f}"
        print(f"{told} {pool_us:9.2f} {wire_us:8.2f} {index_us:9.2f} {snapshot_bytes:24d}, {snapshot_ms:.1f}")


if __name__ == "__main__":
    main()
