"""Blocks of a rank's vLLM cache as bytes, and staging memory on the host for blocks that arrive early.

vLLM's cache is one view per layer, `[blocks, heads, tokens, content]` with any strides. Layers at a constant distance
in one allocation are copied together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.kv import CopyStream, LentBuffers, checksum
from common.engine.transfer import blocks_in_queues
from common.engine.vllm.layout import HeadRange, KVLayout, num_units
from common.errors import ConfigError
from kernels.interface import pinned

LEAST_STAGING_BYTES = 1 << 30
"""Minimum size of staging memory, if the host has that much to give."""
HOST_SHARE = 0.25
"""Maximum fraction of the host's available memory that all its ranks together use as staging memory."""
UNIT_ALIGN_BYTES = 8
"""Alignment of units in host memory: the size of the largest words in which they are copied."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers of a group as one view in words, `[blocks, parts, heads, layers, tokens, content]`.

    A block consists of `parts` consecutive kernel blocks. `start` and `stop` are the words of the layers in a head.
    """

    view: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, parts, tokens and content of a head, as in a unit."""
        _, parts, _, layers, tokens, content = self.view.shape
        return (layers, parts, tokens, content)


class RankCache:
    """The KV cache of one rank, read and written by units. `gather` is for one thread, `write` for another one."""

    def __init__(self, layout: KVLayout, groups: Sequence[Sequence[Tensor]], num_blocks: int) -> None:
        """`groups` has the layers of each group of `layout`. Raises ConfigError if their shape is not supported."""
        self.layout, self.num_blocks = layout, num_blocks
        self.device = groups[0][0].device
        self._runs: list[list[LayerRun]] = []
        self._words: list[torch.dtype] = []
        for number, layers in enumerate(groups):
            word = next(word for word in _WORDS if all(_fits(layer, word) for layer in layers))
            runs = _runs([_with_parts(layer.view(word), num_blocks) for layer in layers])
            heads = {run.view.shape[2] for run in runs}
            size = runs[-1].stop * word.itemsize
            if heads != {len(layout.heads(number))} or size != layout.groups[number].head_bytes:
                rule = f"KV caches of {layout.groups[number]}, not {heads} heads of {size} bytes"
                raise ConfigError("engine", "vllm", rule)
            self._runs.append(runs)
            self._words.append(word)
        self.reading, self._writing = CopyStream(self.device), CopyStream(self.device)
        largest = max(layout.unit_bytes(group) for group in range(len(layout.groups)))
        self.unit_bytes = -(-largest // UNIT_ALIGN_BYTES) * UNIT_ALIGN_BYTES

    def fence(self) -> torch.cuda.Event | None:
        """Return an event that follows what the calling thread launched, or None if all of it has ended."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def gather(self, copies: Sequence[tuple[int, HeadRange, Tensor]]) -> None:
        """Copy heads of blocks to the beginning of places, uint8 [unit_bytes] in host memory.

        Returns when the copies have ended. The address of a place must be a multiple of `UNIT_ALIGN_BYTES`.
        """

        def copy() -> None:
            for block, heads, place in copies:
                word, chosen = self._words[heads.group], heads.heads
                rows = place[: heads.num_bytes].view(word).view(len(chosen), -1)
                into = rows if self.device.type == "cpu" else torch.empty_like(rows, device=self.device)
                for run in self._runs[heads.group]:
                    of = run.view[block, :, chosen.start : chosen.stop].permute(1, 2, 0, 3, 4)
                    into[:, run.start : run.stop].view(len(chosen), *run.shape).copy_(of)
                if into is not rows:
                    rows.copy_(into, non_blocking=True)

        self.reading.wait_for(copy)

    def write(self, group: int, units: Sequence[tuple[int, Tensor]]) -> None:
        """Copy units, uint8 [unit_bytes] in host memory, into blocks. Returns when the copies have ended."""
        word, num_heads = self._words[group], len(self.layout.heads(group))

        def copy() -> None:
            for block, unit in units:
                rows = unit.to(self.device, non_blocking=True).view(word).view(num_heads, -1)
                for run in self._runs[group]:
                    of = rows[:, run.start : run.stop].view(num_heads, *run.shape)
                    run.view[block].copy_(of.permute(2, 0, 1, 3, 4))

        self._writing.wait_for(copy)


def _fits(layer: Tensor, word: torch.dtype) -> bool:
    """Whether each token's content of a layer is a number of words, at multiples of words."""
    size = word.itemsize
    offsets = (layer.storage_offset(), *layer.stride()[:-1], layer.shape[-1])
    return layer.stride(-1) == 1 and all(each * layer.itemsize % size == 0 for each in offsets)


def _with_parts(layer: Tensor, num_blocks: int) -> Tensor:
    """View kernel blocks as parts of blocks: [blocks, parts, heads, tokens, content]."""
    return layer.view(num_blocks, -1, *layer.shape[1:])


def _runs(layers: Sequence[Tensor]) -> list[LayerRun]:
    """Combine consecutive layers of equal shape at a constant distance."""
    runs: list[list[Tensor]] = []
    for layer in layers:
        if runs and _continues(runs[-1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    found: list[LayerRun] = []
    start = 0
    for run in runs:
        first = run[0]
        distance = _distance(first, run[1]) if len(run) > 1 else 0
        blocks, parts, heads, tokens, content = first.shape
        strides = first.stride()
        view = first.as_strided(
            (blocks, parts, heads, len(run), tokens, content), (*strides[:3], distance, *strides[3:])
        )
        stop = start + len(run) * parts * tokens * content
        found.append(LayerRun(view, start, stop))
        start = stop
    return found


def _continues(run: Sequence[Tensor], layer: Tensor) -> bool:
    last = run[-1]
    is_alike = (layer.shape, layer.stride()) == (last.shape, last.stride())
    if not is_alike or layer.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return False
    distance = _distance(last, layer)
    return distance > 0 and (len(run) == 1 or distance == _distance(run[-2], last))


def _distance(first: Tensor, second: Tensor) -> int:
    return int(second.storage_offset()) - int(first.storage_offset())


class PlaceNumbers:
    """Numbers that stand for a block or slot together with a range of heads in it, for `common.engine.transfer`."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._ranges: list[HeadRange] = []
        self._known: dict[HeadRange, int] = {}
        self._lock = threading.Lock()

    def number(self, place: int, heads: HeadRange) -> int:
        """Return the number of these heads of a place."""
        with self._lock:
            known = self._known.get(heads)
            if known is None:
                known = self._known[heads] = len(self._ranges)
                self._ranges.append(heads)
        return known * self._num_places + place

    def of(self, number: int) -> tuple[int, HeadRange]:
        """Inverse of `number`."""
        known, place = divmod(number, self._num_places)
        return place, self._ranges[known]


class RankBlocks(LentBuffers):
    """Outgoing blocks of a rank, for one thread: for frames, and as the `RingSource` and `TransferCache` of a ring."""

    shared = None

    def __init__(self, cache: RankCache) -> None:
        super().__init__(cache.reading, cache.unit_bytes)
        self._cache = cache
        self.num_blocks, self.wire_bytes = cache.num_blocks, cache.unit_bytes
        self.numbers = PlaceNumbers(cache.num_blocks)
        self.reserve(blocks_in_queues(cache.unit_bytes))

    def num_bytes(self, index: int) -> int:
        return self.numbers.of(index)[1].num_bytes

    def view(self, index: int) -> memoryview:
        return self.views([index])[0]

    def views(self, indices: Sequence[int]) -> list[memoryview]:
        """Return a `view` of each block, copied together."""
        buffers = [self.take() for _ in indices]
        self._gather(list(zip(indices, buffers, strict=True)))
        return [self.lend(buffer, self.num_bytes(index)) for index, buffer in zip(indices, buffers, strict=True)]

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        self._gather(copies)
        return [checksum(place.numpy().data[: self.num_bytes(index)]) for index, place in copies]

    def _gather(self, copies: Sequence[tuple[int, Tensor]]) -> None:
        self._cache.gather([(*self.numbers.of(index), place) for index, place in copies])


def staging_bytes(cache: RankCache, longest: int, memory_bytes: float) -> int:
    """Return the size of staging memory that stores any prompt of up to `longest` tokens, in bytes.

    It is at least `LEAST_STAGING_BYTES`. `memory_bytes`: available memory for each rank of this host, of which it takes
    `HOST_SHARE`, but one slot at least. A rank that receives nothing needs one: `longest` is 0.
    """
    if not longest:
        return cache.unit_bytes
    wanted = max(LEAST_STAGING_BYTES, num_units(cache.layout.groups, longest) * cache.unit_bytes)
    return max(cache.unit_bytes, int(min(wanted, HOST_SHARE * memory_bytes)))


class StagingSlots:
    """Slots in host memory, pinned for a GPU, that each store one unit. Also the receiver's `IncomingBlocks`."""

    def __init__(self, cache: RankCache, num_bytes: int) -> None:
        """Raises ConfigError if no unit fits."""
        self.slot_bytes = cache.unit_bytes
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ConfigError("staging_bytes", num_bytes, f"at least the {self.slot_bytes} bytes of a block")
        size = self.num_slots * self.slot_bytes
        is_pinned = cache.device.type == "cuda"
        memory = torch.from_numpy(pinned().allocate(size)) if is_pinned else torch.empty(size, dtype=torch.uint8)
        self._memory = memory.view(self.num_slots, self.slot_bytes)
        self._rows = self._memory.numpy()
        self._free = list(range(self.num_slots))[::-1]
        self.numbers = PlaceNumbers(self.num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocate `count` of the free slots."""
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Free slots."""
        self._free.extend(slots)

    def unit(self, slot: int, num_bytes: int) -> Tensor:
        """Return the first bytes of a slot."""
        return self._memory[slot, :num_bytes]

    def num_bytes(self, index: int) -> int:
        return self.numbers.of(index)[1].num_bytes

    def view(self, index: int) -> memoryview:
        slot, heads = self.numbers.of(index)
        return self._rows[slot, heads.start : heads.stop].data

    def commit(self, indices: Sequence[int]) -> None:
        """Nothing to copy: units stay in their slots until they are loaded."""

    def problems(self, used: Sequence[int]) -> list[str]:
        """Return what is inconsistent, given the slots in use."""
        every = sorted([*self._free, *used])
        if every == list(range(self.num_slots)):
            return []
        return [f"{len(self._free)} slots are free and {len(used)} used, but there are {self.num_slots}"]
