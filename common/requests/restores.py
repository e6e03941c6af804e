"""Prompts that take blocks from the tiers below the prefix cache instead of computing them.

A prompt that owns its blocks waits for a read only where the read is predicted to be faster than computing, and at most
as long as computing would take: then, or when a tier fails, it goes on from what was read. Steps of others never wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.latency.link_model import LinkModel
from common.latency.step_model import StepModel, StepShape
from common.requests.sequence import WorkerSequence
from common.tiers.block_read import BlockRead
from common.tiers.block_tiers import BlockTiers
from common.worker.metrics import WorkerMetrics

LEAST_WAIT_S, MOST_WAIT_S = 0.05, 5.0
"""Bounds of the wait for a read: a disk that is asleep may need the first, and the second is for a prompt whose
computing cannot be predicted yet, as after a restart."""


class Restores:
    """Without `tiers` nothing is ever read. Belongs to the engine's thread."""

    def __init__(self, tiers: BlockTiers | None, block_size: int, metrics: WorkerMetrics) -> None:
        self._tiers, self._block_size, self._metrics = tiers, block_size, metrics

    @property
    def link(self) -> LinkModel:
        """What reads take, for routers."""
        return self._tiers.link if self._tiers is not None else LinkModel()

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """How many of the chain's first blocks could be read."""
        return self._tiers.num_held(hashes) if self._tiers is not None else 0

    def begin(self, sequence: WorkerSequence, now: float, model: StepModel, most_tokens: int) -> None:
        """Begin a read for a sequence that was admitted just now, if it is worth one.

        By `model`, steps of `most_tokens` tokens would compute the same.
        """
        if self._tiers is None:
            return
        first, size = sequence.num_computed // self._block_size, self._block_size
        hashes = sequence.hasher.hashes[: sequence.num_cacheable // size]
        self._tiers.touch(hashes[:first])
        num_blocks = min(self._tiers.num_held(hashes[first:]), len(sequence.blocks) - first)
        if num_blocks <= 0:
            return
        hashes = hashes[first : first + num_blocks]
        computed = StepShape.of_prompt(first * size, (first + num_blocks) * size)
        compute_s = model.steps_s(computed, most_tokens) if model.knows_prompts else MOST_WAIT_S
        if self._tiers.seconds(hashes) >= compute_s:
            self._metrics.count_tier_read("slower")
            return
        deadline = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, compute_s))
        blocks = sequence.blocks[first : first + num_blocks]
        sequence.read = BlockRead(sequence.request_id, sequence.attempt, hashes, blocks, deadline)
        sequence.num_expected_hits = (first + num_blocks) * size
        self._tiers.read(sequence.read)

    def late(self, sequences: Iterable[WorkerSequence], now: float) -> list[BlockRead]:
        """Reads whose time is over."""
        if self._tiers is None:
            return []
        return [each.read for each in sequences if each.read is not None and each.read.deadline < now]

    def end(self, sequence: WorkerSequence, read: BlockRead) -> None:
        """Take the blocks back from a read that has ended, or whose time is over."""
        read.cancel()
        sequence.read = None
        is_whole = read.num_done == len(read.blocks)
        self._metrics.count_tier_read("read" if is_whole else "late" if not read.ended else "missing")
        for tier, num_blocks in read.by_tier.items():
            self._metrics.count_hits(num_blocks * self._block_size, tier)

    def drop(self, sequence: WorkerSequence) -> None:
        """Take the blocks back from the read of a sequence that ends."""
        if sequence.read is not None:
            sequence.read.cancel()
            sequence.read = None

    def reset(self) -> None:
        """Forget every block in every tier."""
        if self._tiers is not None:
            self._tiers.reset()

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
