"""KV cache of a worker whose ranks each store some of its KV heads, as seen by rank 0.

    block of the worker   [layer][head 0 | head 1 | head 2 | head 3][slot][K|V][head_dim]
    block of rank 0       [layer][head 0 | head 1] ...       of rank 1   [layer][head 2 | head 3] ...

Rank 0 maps the memory of ranks on its own host and sends requests to ranks on other hosts. The wire format and the
checksums use whole blocks, so the number of ranks may differ between workers.
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
"""Size of a group: blocks requested from, or sent to, another host in one message (at least one block)."""
EXCHANGE_TIMEOUT_S = 60.0
"""Timeout, in seconds, for other threads to finish their exchange with ranks on other hosts."""

Item = TypeVar("Item")


class RemoteHeads(Protocol):
    """Cache of a rank on another host. One thread at a time sends requests and reads the replies in order.

    Methods raise RankLost when a deadline passes.
    """

    def ask(self, indices: Sequence[int], heads: range) -> None:
        """Request `heads` of the blocks `indices`. `take` receives them in this order."""

    def take(self, parts: Sequence[memoryview]) -> None:
        """Fill `parts` with the next requested block."""

    def put(self, indices: Sequence[int]) -> None:
        """Start writing the blocks `indices`, all heads of the rank. Call `give` for each, then `confirm`."""

    def give(self, parts: Sequence[memoryview]) -> None:
        """Send the bytes of the next block of `put`."""

    def clear(self, index: int, first_slot: int) -> None:
        """Zero the slots of a block from `first_slot`. `confirm` waits for completion."""

    def confirm(self) -> None:
        """Wait for the oldest unconfirmed `put` or `clear`."""

    def cut(self) -> None:
        """Close the connection after a failed request, which also ends the worker."""


class ShardedCache(KVCache):
    """Rank 0's own cache, used by its steps, plus the memory of other ranks. `gather` and `scatter` access blocks."""

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
        self._parts: list[Tensor] = [self.tensor]  # ranks of this host, which come first
        self._remotes: list[RemoteHeads] = []
        self._order = StepOrder(self.tensor.device)
        self._exchange_lock = threading.Lock()
        self._on_host: Tensor | None = None  # staging for a block between another host and a GPU

    def attach(self, part: Tensor) -> None:
        """Add the cache of the next rank, in memory that this process can access.

        Raises ModelError if its shape or dtype differs.
        """
        if part.shape != self.tensor.shape or part.dtype != self.dtype:  # all ranks have the same number of heads
            found, wanted = (f"{list(each.shape)} of {each.dtype}" for each in (part, self.tensor))
            raise ModelError(f"the KV cache of rank {len(self._parts)} is {found}, but that of rank 0 is {wanted}")
        self._parts.append(part)

    def attach_file(self, descriptor: int) -> None:
        """Map the memory file of the next rank. Raises ModelError if it is too small, or OSError."""
        num_bytes = self.tensor.numel() * self.dtype.itemsize
        try:
            pages = mmap.mmap(descriptor, num_bytes)
        except ValueError as error:
            raise ModelError(f"the KV memory of rank {len(self._parts)} is smaller than {num_bytes} bytes") from error
        self.attach(torch.frombuffer(memoryview(pages), dtype=self.dtype).view(self.tensor.shape))

    def attach_remote(self, heads: RemoteHeads) -> None:
        """Add the cache of the next rank, on another host. All ranks of this host must have been attached."""
        if self.device.type == "cuda" and self._on_host is None:
            self._on_host = torch.from_numpy(pinned().allocate(self.wire_bytes))
        self._remotes.append(heads)

    def block(self, index: int) -> memoryview:
        raise BlockError("a block split across ranks has no contiguous bytes: use gather")

    @property
    def wire_heads(self) -> int:
        return self._num_heads

    @property
    def wire_bytes(self) -> int:
        return self.block_bytes // self.config.num_kv_heads * self._num_heads

    def new_block(self) -> Tensor:
        """Allocate one whole block on rank 0's device: [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return torch.empty(layers, self._num_heads, *rest, dtype=self.dtype, device=self.device)

    def clear_slots(self, index: int, first: int) -> None:
        """Zero the slots on every rank, before the next step runs. Call it on the thread that launches steps.

        Also raises RankLost.
        """
        self._check(index)
        with self._remote_exchange():
            for remote in self._remotes:
                remote.clear(index, first)
            self._order.run([(part.device, partial(clear_slots, part[index], first)) for part in self._parts])
            for remote in self._remotes:
                remote.confirm()

    def gather(self, index: int, block: Tensor) -> None:
        """Copy a block of all ranks into `block`, uint8 [wire_bytes] on any device.

        Waits for the copy if `block` is in host memory. Raises BlockError if the index is out of range, RankLost if
        another host does not answer.
        """
        self.gather_all([(index, block)])

    def gather_all(self, blocks: Sequence[tuple[int, Tensor]]) -> None:
        """Call `gather` for several blocks, with one request per group to other hosts."""
        for index, _ in blocks:
            self._check(index)
        owners = kv_owners(self._num_heads, self._size)
        local = len(self._parts)
        lenders = [
            (remote, owned, owned.start - Shard(rank, self._size).kv_heads(self._num_heads).start)
            for rank, (remote, owned) in enumerate(zip(self._remotes, owners[local:], strict=True), local)
            if owned
        ]
        with self._remote_exchange():
            for group in in_groups(blocks, self.wire_bytes):
                for remote, owned, first in lenders:
                    remote.ask([index for index, _ in group], range(first, first + len(owned)))
                for index, block in group:
                    self._gather_parts(index, block, owners[:local])
                    self._take(block, [(remote, owned) for remote, owned, _ in lenders])

    def scatter(self, block: Tensor, index: int) -> None:
        """Copy `block`, in the format of `gather`, to all ranks. Also raises RankLost."""
        self.scatter_all([(index, block)])

    def scatter_all(self, blocks: Sequence[tuple[int, Tensor]]) -> None:
        """Call `scatter` for several blocks, with one confirmation per group from other hosts."""
        for index, _ in blocks:
            self._check(index)
        with self._remote_exchange():
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
        """Receive the requested heads, directly into a block in host memory."""
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
        """Return the block itself, or the staging memory for a GPU block."""
        if block.device.type == "cpu":
            return block
        assert self._on_host is not None  # set by attach_remote
        return self._on_host

    @contextlib.contextmanager
    def _remote_exchange(self) -> Iterator[None]:
        """Serialise access to other hosts. After an error, pending replies would be misread, so disconnect."""
        if not self._remotes:
            yield
            return
        if not self._exchange_lock.acquire(timeout=EXCHANGE_TIMEOUT_S):
            raise RankLost(
                f"timed out after {EXCHANGE_TIMEOUT_S:g} s waiting for other threads' exchange with other hosts"
            )
        try:
            yield
        except BaseException:
            for remote in self._remotes:
                remote.cut()
            raise
        finally:
            self._exchange_lock.release()

    def _heads_of(self, block: Tensor) -> Tensor:
        """View a block's bytes as [layers, all KV heads, block_size, 2, width]."""
        _, layers, _, *rest = self.tensor.shape
        return block.view(self.dtype).view(layers, self._num_heads, *rest)


def in_groups(blocks: Sequence[Item], wire_bytes: int) -> Iterator[Sequence[Item]]:
    """Split `blocks` into groups that are exchanged with other hosts in one message."""
    size = blocks_at_once(wire_bytes)
    for begin in range(0, len(blocks), size):
        yield blocks[begin : begin + size]


def blocks_at_once(wire_bytes: int) -> int:
    """Return the number of blocks per group, given the bytes of a block of all ranks."""
    return max(1, GROUP_BYTES // wire_bytes)


def segments(block: memoryview, layers: int, total: int, heads: range) -> list[memoryview]:
    """Return where the bytes of `heads`, of `total`, are in a block: one segment, or one per layer."""
    if len(heads) == total:
        return [block]
    layer_bytes, head_bytes = len(block) // layers, len(block) // layers // total
    starts = range(heads.start * head_bytes, len(block), layer_bytes)
    return [block[start : start + len(heads) * head_bytes] for start in starts]
