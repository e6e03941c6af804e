"""The KV cache of a worker whose ranks each hold some of its KV heads, as rank 0 sees it.

    block of the worker   [layer][head 0 | head 1 | head 2 | head 3][slot][K|V][head_dim]
    block of rank 0       [layer][head 0 | head 1] ...       of rank 1   [layer][head 2 | head 3] ...

Rank 0 maps the memory of ranks of its own host. Those of other hosts are asked.

On the wire and in checksums there are blocks of the worker alone, so another worker may have another number of ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache, clear_slots
from common.engine.kv.step_order import StepOrder
from common.errors import BlockError, ModelError, RankLost
from common.model_files.architecture import Shard, kv_owners
from kernels.interface import KVScales, pinned

if TYPE_CHECKING:
    from common.model_files import ModelConfig

GROUP_BYTES = 4 * 2**20
"""Of blocks that another host is asked for, or sent, in one order with one answer; at least one block."""
TURN_S = 60.0
"""How long a thread waits for others that talk to ranks of other hosts, each of whose orders has a deadline."""

Item = TypeVar("Item")


class RemoteHeads(Protocol):
    """The cache of a rank on another host. One thread at a time gives orders, and takes what each asks for in order.

    Raises RankLost at deadlines.
    """

    def ask(self, indices: Sequence[int], heads: range) -> None:
        """Ask for heads of some blocks; `take` gets them in this order."""

    def take(self, parts: Sequence[memoryview]) -> None:
        """Fill `parts` with the next block that was asked for."""

    def put(self, indices: Sequence[int]) -> None:
        """Write some blocks, all heads of the rank: `give` follows for each, and `confirm` waits for all of them."""

    def give(self, parts: Sequence[memoryview]) -> None:
        """The bytes of the next block of `put`."""

    def clear(self, index: int, first_slot: int) -> None:
        """Zero the slots of a block from `first_slot` on, which `confirm` waits for."""

    def confirm(self) -> None:
        """The first `put` or `clear` that was not confirmed is done."""

    def cut(self) -> None:
        """Some order has failed: end the connection, and with it the worker."""


class ShardedCache(KVCache):
    """Rank 0's own cache, which its steps use, and the memory of the others'. Blocks are for `gather` and `scatter`."""

    def __init__(
        self,
        whole: ModelConfig,
        num_ranks: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | str,
        device: torch.device | str = "cpu",
        scales: Sequence[KVScales] = (),
    ) -> None:
        super().__init__(Shard(0, num_ranks).of(whole), num_blocks, block_size, dtype, device, scales=scales)
        self._num_heads, self._size = whole.num_kv_heads, num_ranks
        self._parts: list[Tensor] = [self.tensor]  # of the ranks of this host, which are the first
        self._remotes: list[RemoteHeads] = []
        self._order = StepOrder(self.tensor.device)
        self._turn = threading.Lock()
        self._on_host: Tensor | None = None  # a block on its way between another host and a GPU

    def attach(self, part: Tensor) -> None:
        """The cache of the next rank, in memory that this process reaches. Raises ModelError if it is another's."""
        if part.shape != self.tensor.shape or part.dtype != self.dtype:  # all ranks have as many heads
            found, wanted = (f"{list(each.shape)} of {each.dtype}" for each in (part, self.tensor))
            raise ModelError(f"the KV cache of rank {len(self._parts)} is {found}, that of rank 0 {wanted}")
        self._parts.append(part)

    def attach_file(self, descriptor: int) -> None:
        """Maps the memory file of the next rank. Raises ModelError for one that is too small, or OSError."""
        num_bytes = self.tensor.numel() * self.dtype.itemsize
        try:
            pages = mmap.mmap(descriptor, num_bytes)
        except ValueError as error:
            raise ModelError(f"the KV memory of rank {len(self._parts)} is below {num_bytes} bytes") from error
        self.attach(torch.frombuffer(memoryview(pages), dtype=self.dtype).view(self.tensor.shape))

    def attach_remote(self, heads: RemoteHeads) -> None:
        """The cache of the next rank, on another host. None of this host can follow."""
        if self.device.type == "cuda" and self._on_host is None:
            self._on_host = torch.from_numpy(pinned().allocate(self.wire_bytes))
        self._remotes.append(heads)

    def block(self, index: int) -> memoryview:
        raise BlockError("a block of several ranks lies in several places: gather it")

    @property
    def wire_heads(self) -> int:
        return self._num_heads

    @property
    def wire_bytes(self) -> int:
        return self.block_bytes // self.config.num_kv_heads * self._num_heads

    def new_block(self) -> Tensor:
        """Memory of one block of all ranks on rank 0's device: [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return torch.empty(layers, self._num_heads, *rest, dtype=self.dtype, device=self.device)

    def clear_slots(self, index: int, first: int) -> None:
        """On every rank, before the next step runs. By the thread that launches steps. Also raises RankLost."""
        self._check(index)
        with self._turn_with_remotes():
            for remote in self._remotes:
                remote.clear(index, first)
            self._order.run([(part.device, partial(clear_slots, part[index], first)) for part in self._parts])
            for remote in self._remotes:
                remote.confirm()

    def gather(self, index: int, block: Tensor) -> None:
        """Copies a block of all ranks into `block`, uint8 [wire_bytes] anywhere, and waits for that where it is host
        memory.

        BlockError out of range, RankLost when another host does not answer.
        """
        self.gather_all([(index, block)])

    def gather_all(self, blocks: Sequence[tuple[int, Tensor]]) -> None:
        """`gather`, for several blocks: other hosts are asked for a group of them at once."""
        for index, _ in blocks:
            self._check(index)
        owners = kv_owners(self._num_heads, self._size)
        local = len(self._parts)
        lenders = [
            (remote, owned, owned.start - Shard(rank, self._size).kv_heads(self._num_heads).start)
            for rank, (remote, owned) in enumerate(zip(self._remotes, owners[local:], strict=True), local)
            if owned
        ]
        with self._turn_with_remotes():
            for group in in_groups(blocks, self.wire_bytes):
                for remote, owned, first in lenders:
                    remote.ask([index for index, _ in group], range(first, first + len(owned)))
                for index, block in group:
                    self._gather_parts(index, block, owners[:local])
                    self._take(block, [(remote, owned) for remote, owned, _ in lenders])

    def scatter(self, block: Tensor, index: int) -> None:
        """Copies `block`, as `gather` makes it, to all ranks. Also raises RankLost."""
        self.scatter_all([(index, block)])

    def scatter_all(self, blocks: Sequence[tuple[int, Tensor]]) -> None:
        """`scatter`, for several blocks: other hosts confirm a group of them at once."""
        for index, _ in blocks:
            self._check(index)
        with self._turn_with_remotes():
            for group in in_groups(blocks, self.wire_bytes):
                for remote in self._remotes:
                    remote.put([index for index, _ in group])
                for index, block in group:
                    self._give(block)
                    self._scatter_parts(block, index)
                for remote in self._remotes:
                    remote.confirm()

    def _gather_parts(self, index: int, block: Tensor, owners: Sequence[range]) -> None:
        whole = self._heads_of(block)
        for rank, owned in enumerate(owners):
            if owned:
                first = owned.start - Shard(rank, self._size).kv_heads(self._num_heads).start
                whole[:, owned.start : owned.stop] = self._parts[rank][index][:, first : first + len(owned)]

    def _take(self, block: Tensor, lenders: Sequence[tuple[RemoteHeads, range]]) -> None:
        """What remotes were asked for, straight into a block of host memory."""
        if not lenders:
            return
        on_host = self._in_host_memory_of(block)
        for remote, owned in lenders:
            remote.take(self._segments(on_host, owned))
        if on_host is not block:
            whole, found = self._heads_of(block), self._heads_of(on_host)
            for _, owned in lenders:
                whole[:, owned.start : owned.stop].copy_(found[:, owned.start : owned.stop])

    def _scatter_parts(self, block: Tensor, index: int) -> None:
        whole = self._heads_of(block)
        for rank, part in enumerate(self._parts):
            heads = Shard(rank, self._size).kv_heads(self._num_heads)
            part[index].copy_(whole[:, heads.start : heads.stop])

    def _give(self, block: Tensor) -> None:
        if not self._remotes:
            return
        on_host = self._in_host_memory_of(block)
        if on_host is not block:
            on_host.copy_(block)
        for rank, remote in enumerate(self._remotes, len(self._parts)):
            heads = Shard(rank, self._size).kv_heads(self._num_heads)
            remote.give(self._segments(on_host, heads))

    def _segments(self, block: Tensor, heads: range) -> list[memoryview]:
        return segments(block.numpy().data, self.config.num_layers, self._num_heads, heads)

    def _in_host_memory_of(self, block: Tensor) -> Tensor:
        """The block itself, or the memory for one of a GPU."""
        if block.device.type == "cpu":
            return block
        assert self._on_host is not None  # since the first rank of another host came
        return self._on_host

    @contextlib.contextmanager
    def _turn_with_remotes(self) -> Iterator[None]:
        """One thread at a time talks to other hosts. After an error answers would be to other orders: cut then."""
        if not self._remotes:
            yield
            return
        if not self._turn.acquire(timeout=TURN_S):
            raise RankLost(f"other hosts were busy with other blocks for {TURN_S:g} s")
        try:
            yield
        except BaseException:
            for remote in self._remotes:
                remote.cut()
            raise
        finally:
            self._turn.release()

    def _heads_of(self, block: Tensor) -> Tensor:
        """[layers, all KV heads, block_size, 2, width] over the bytes of a block."""
        _, layers, _, *rest = self.tensor.shape
        return block.view(self.dtype).view(layers, self._num_heads, *rest)


def in_groups(blocks: Sequence[Item], wire_bytes: int) -> Iterator[Sequence[Item]]:
    """Of blocks that cross to other hosts together."""
    size = blocks_at_once(wire_bytes)
    for begin in range(0, len(blocks), size):
        yield blocks[begin : begin + size]


def blocks_at_once(wire_bytes: int) -> int:
    """How many blocks of so many bytes, of all ranks, are in a group."""
    return max(1, GROUP_BYTES // wire_bytes)


def segments(block: memoryview, layers: int, total: int, heads: range) -> list[memoryview]:
    """Where the bytes of some of `total` heads are in a block: in one place, or in one of each layer."""
    if len(heads) == total:
        return [block]
    layer_bytes, head_bytes = len(block) // layers, len(block) // layers // total
    starts = range(heads.start * head_bytes, len(block), layer_bytes)
    return [block[start : start + len(heads) * head_bytes] for start in starts]
