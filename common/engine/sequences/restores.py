"""Restores a prompt's blocks from tiers below the prefix cache, or from a peer, instead of computing them.

A prompt that owns its blocks waits for a read only if the read is predicted to be faster than computing, and at most
as long as computing would take. If the time is over, or a tier or peer fails, the prompt continues from what was read.
Steps of other prompts never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.engine.kv.tiers import BlockRead, BlockTiers
from common.engine.sequences.sequence import WorkerSequence
from common.engine.transfer import PeerCaches
from common.engine.worker import WorkerMetrics
from common.latency import WORTHWHILE, LinkModel, Links, StepModel, StepShape
from common.wire.messages import KVPeer

LEAST_WAIT_S, MOST_WAIT_S = 0.05, 5.0
"""Bounds of the wait for a read, in seconds. A sleeping disk may need the minimum. The maximum applies to prompts whose
compute time cannot be predicted yet, for example after a restart."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of `num_blocks` blocks: tiers or `peer`.

    `seconds`: predicted time to get them. `compute_s`: predicted time to compute them.
    """

    num_blocks: int
    seconds: float
    compute_s: float
    peer: KVPeer | None = None


class BlockRestorer:
    """Starts and ends reads. Without `tiers` nothing is read, without `peers` nothing is pulled. Engine thread only."""

    def __init__(
        self, tiers: BlockTiers | None, block_size: int, metrics: WorkerMetrics, peers: PeerCaches | None = None
    ) -> None:
        self._tiers, self._peers, self._block_size, self._metrics = tiers, peers, block_size, metrics

    @property
    def links(self) -> Links:
        """Measured times of reads and pulls, for routers."""
        return Links(
            disk=self._tiers.link if self._tiers is not None else LinkModel(),
            peer=self._peers.puller.link if self._peers is not None else LinkModel(),
        )

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the chain's leading blocks can be read."""
        return self._tiers.num_held(hashes) if self._tiers is not None else 0

    def expect_pull(self, sequence: WorkerSequence) -> None:
        """Record the blocks that the router expects a new request to pull, for the prediction of its duration."""
        peer, size = sequence.request.peer, self._block_size
        if self._peers is not None and peer is not None:
            num_blocks = min(peer.num_blocks, sequence.num_cacheable // size)
            sequence.num_expected_hits = max(sequence.num_expected_hits, num_blocks * size)

    def begin(self, sequence: WorkerSequence, now: float, model: StepModel, most_tokens: int) -> None:
        """Start a read or pull for a newly admitted sequence, if it pays off.

        The alternative is to compute in steps of `most_tokens` tokens, whose time `model` predicts.
        """
        if self._tiers is None and self._peers is None:
            return
        first, size = sequence.num_computed // self._block_size, self._block_size
        hashes = sequence.hasher.hashes[: sequence.num_cacheable // size]
        if self._tiers is not None:
            self._tiers.touch(hashes[:first])

        def compute_s(num_blocks: int) -> float:
            if not model.knows_prompts:
                return MOST_WAIT_S * num_blocks / max(1, len(hashes) - first)
            return model.steps_s(StepShape.of_prompt(first * size, (first + num_blocks) * size), most_tokens)

        hashes = hashes[: len(sequence.blocks)]  # with a window, a long prompt owns only its first part
        ways = [*self._from_tiers(hashes[first:], compute_s), *self._from_peer(sequence, hashes, first, now, compute_s)]
        best = max(ways, key=lambda way: way.compute_s - way.seconds, default=None)
        if best is None:
            sequence.num_expected_hits = sequence.num_computed
            return
        num_blocks, blocks = best.num_blocks, sequence.blocks[first : first + best.num_blocks]
        deadline = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, best.compute_s))
        chain = hashes[first : first + num_blocks]
        sequence.read = read = BlockRead(sequence.request_id, sequence.attempt, chain, blocks, deadline)
        sequence.num_expected_hits = (first + num_blocks) * size
        if best.peer is not None and self._peers is not None:
            read.is_pull = True
            self._peers.puller.pull(read, best.peer)
        elif self._tiers is not None:
            self._tiers.read(read)

    def _from_tiers(self, hashes: Sequence[bytes], compute_s: Callable[[int], float]) -> Iterator[_Source]:
        if self._tiers is None or not (num_blocks := self._tiers.num_held(hashes)):
            return
        way = _Source(num_blocks, self._tiers.seconds(hashes[:num_blocks]), compute_s(num_blocks))
        if way.seconds < way.compute_s:
            yield way
        else:
            self._metrics.count_tier_read("slower")

    def _from_peer(
        self,
        sequence: WorkerSequence,
        hashes: Sequence[bytes],
        first: int,
        now: float,
        compute_s: Callable[[int], float],
    ) -> Iterator[_Source]:
        peer = sequence.request.peer
        if self._peers is None or peer is None or (num_blocks := min(peer.num_blocks, len(hashes)) - first) <= 0:
            return
        way = _Source(num_blocks, self._peers.puller.link.seconds(num_blocks), compute_s(num_blocks), peer)
        if way.seconds > WORTHWHILE * way.compute_s:
            self._metrics.count_pull("slower")
        elif not self._peers.puller.can_pull(peer, now):
            self._metrics.count_pull("refused")
        else:
            yield way

    def late(self, sequences: Iterable[WorkerSequence], now: float) -> list[BlockRead]:
        """Return reads that have exceeded their deadline."""
        if self._tiers is None and self._peers is None:
            return []
        return [each.read for each in sequences if each.read is not None and each.read.deadline < now]

    def end(self, sequence: WorkerSequence, read: BlockRead) -> None:
        """End a read that is complete or overdue, and stop its writes to the blocks."""
        read.cancel()
        sequence.read = None
        is_whole = read.num_done == len(read.blocks)
        if read.is_pull:
            self._metrics.count_pull("pulled" if is_whole else "missing" if read.ended and not read.is_late else "late")
        else:
            self._metrics.count_tier_read("read" if is_whole else "late" if not read.ended else "missing")
        for tier, num_blocks in read.by_tier.items():
            self._metrics.count_hits(num_blocks * self._block_size, tier)

    def drop(self, sequence: WorkerSequence) -> None:
        """Cancel the read of a sequence that ends."""
        if sequence.read is not None:
            sequence.read.cancel()
            sequence.read = None

    def reset(self) -> None:
        """Drop all blocks of all tiers."""
        if self._tiers is not None:
            self._tiers.reset()

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()  # first, because the lender reads tiers
        if self._tiers is not None:
            self._tiers.close()
