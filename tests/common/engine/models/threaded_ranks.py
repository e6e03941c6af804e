"""Ranks that are threads of one process: what each of them generates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from common.engine.ranks.shard import load_shard
from common.model_files.architecture.shard import Shard
from common.model_files.files import ModelFiles

from .generation import Pool

WAIT_S = 60.0


class ThreadedRanks:
    """`Collectives` for ranks that are threads of one process; rank `rank` calls with its own `Member`."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)

    def all_parts(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        found = [one for one in self.parts if one is not None]
        self.barrier.wait()
        return found


class Member:
    def __init__(self, ranks: ThreadedRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def add_up(self, part: Tensor) -> Tensor:
        total, *others = self.ranks.all_parts(self.rank, part)
        for other in others:
            total = total + other
        return total

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        assert part.shape[1] == widths[self.rank]
        return torch.cat(self.ranks.all_parts(self.rank, part), 1)


class Sums:
    """What a rank that only loads has in place of the others."""

    def add_up(self, part: Tensor) -> Tensor:
        return part

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        return part


def greedy_of_ranks(
    files: ModelFiles, size: int, tokens: Sequence[int], count: int, quantization: str = "none"
) -> list[list[int]]:
    """What each rank generates, in chunks."""
    ranks = ThreadedRanks(size)

    def run(rank: int) -> list[int]:
        shard, member = Shard(rank, size), Member(ranks, rank)
        model = load_shard(files, shard, member, dtype="float32", device="cpu", quantization=quantization)
        return Pool(model).greedy(list(tokens), count, chunk=16)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
