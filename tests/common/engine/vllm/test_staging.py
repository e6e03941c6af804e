from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.engine.kv import checksum
from common.engine.vllm.layout import HeadRange, KVGroup, KVLayout
from common.engine.vllm.staging import (
    LEAST_STAGING_BYTES,
    PlaceNumbers,
    RankBlocks,
    RankCache,
    StagingSlots,
    staging_bytes,
)
from common.errors import ConfigError

BLOCKS, HEADS, TOKENS, LAYERS = 6, 4, 8, 3


def layers_of(order: str, content: int, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
    """Layers in one allocation whose axes have this order, each [blocks * parts, heads, tokens / parts, content]."""
    sizes = {"L": LAYERS, "B": BLOCKS * parts, "H": HEADS, "N": TOKENS // parts, "C": content}
    raw = torch.randint(0, 100, tuple(sizes[axis] for axis in order)).to(dtype)
    every = raw.permute(*(order.index(axis) for axis in "LBHNC"))
    return list(every)


def canonical(layers: list[Tensor], block: int, heads: range, parts: int = 1) -> bytes:
    """The bytes of a unit, by its definition: head, layer, token, content."""
    rows = [
        layer[block * parts + token // (TOKENS // parts), head, token % (TOKENS // parts)].contiguous()
        for head in heads
        for layer in layers
        for token in range(TOKENS)
    ]
    return b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)


def read(cache: RankCache, blocks: list[int], heads: range) -> list[bytes]:
    """The heads of blocks as bytes, in frames and in slots of a ring."""
    outgoing, each = RankBlocks(cache), cache.layout.groups[0].head_bytes
    chosen = HeadRange(0, heads, heads.start * each, heads.stop * each)
    numbers = [outgoing.numbers.number(block, chosen) for block in blocks]
    frames = [bytes(view) for view in outgoing.views(numbers)]
    places = [torch.zeros(outgoing.block_bytes, dtype=torch.uint8) for _ in blocks]
    sums = outgoing.copy_all(list(zip(numbers, places, strict=True)))
    in_ring = [
        bytes(place.numpy()[: outgoing.num_bytes(number)]) for number, place in zip(numbers, places, strict=True)
    ]
    assert in_ring == frames and sums == [checksum(memoryview(frame)) for frame in frames]
    return frames


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize(
    ("content", "dtype"), [(16, torch.float32), (5, torch.float16), (3, torch.uint8), (16, torch.float8_e4m3fn)]
)
def test_units_have_the_same_bytes_in_any_memory_layout(order: str, content: int, dtype: torch.dtype) -> None:
    layers = layers_of(order, content, dtype)
    head_bytes = LAYERS * TOKENS * content * dtype.itemsize
    layout = KVLayout((KVGroup("full", TOKENS, HEADS, head_bytes),), str(dtype))
    cache = RankCache(layout, [layers], BLOCKS)
    assert read(cache, [4, 1], range(1, 3)) == [canonical(layers, block, range(1, 3)) for block in (4, 1)]
    slots = StagingSlots(cache, 2 * 8 * (HEADS * head_bytes))
    unit = slots.unit(1, layout.unit_bytes(0))
    unit.copy_(torch.frombuffer(bytearray(canonical(layers, 4, range(HEADS))), dtype=torch.uint8))
    cache.write(0, [(2, unit)])
    assert canonical(layers, 2, range(HEADS)) == canonical(layers, 4, range(HEADS))


def test_kernel_blocks_are_parts_of_a_block() -> None:
    layers = layers_of("LBHNC", 4, torch.float32, parts=2)
    layout = KVLayout((KVGroup("full", TOKENS, HEADS, LAYERS * TOKENS * 4 * 4),), "float32")
    cache = RankCache(layout, [layers], BLOCKS)
    assert read(cache, [3], range(HEADS)) == [canonical(layers, 3, range(HEADS), parts=2)]


def test_layers_in_allocations_of_their_own_and_of_other_shapes() -> None:
    layers = [torch.rand(BLOCKS, HEADS, TOKENS, content) for content in (4, 6, 6)]
    layout = KVLayout((KVGroup("full", TOKENS, HEADS, 16 * TOKENS * 4),), "float32")
    cache = RankCache(layout, [layers], BLOCKS)
    assert read(cache, [5], range(HEADS)) == [canonical(layers, 5, range(HEADS))]


def test_another_shape_than_described_is_refused() -> None:
    layout = KVLayout((KVGroup("full", TOKENS, HEADS, 100),), "float32")
    with pytest.raises(ConfigError, match="KV caches of"):
        RankCache(layout, [[torch.rand(BLOCKS, HEADS, TOKENS, 4)]], BLOCKS)


def tiny_cache() -> RankCache:
    """Two heads of 12 bytes."""
    layout = KVLayout((KVGroup("full", 1, 2, 12),), "float32")
    return RankCache(layout, [[torch.rand(BLOCKS, 2, 1, 3)]], BLOCKS)


def test_numbers_stand_for_a_place_and_heads() -> None:
    numbers = PlaceNumbers(10)
    ranges = [HeadRange(0, range(2), 0, 8), HeadRange(1, range(1), 0, 4)]
    given = {(place, heads): numbers.number(place, heads) for place in range(10) for heads in ranges}
    assert len(set(given.values())) == 20
    assert all(numbers.of(number) == key for key, number in given.items())


def test_slots_are_lent_once_and_views_are_their_heads() -> None:
    cache = tiny_cache()
    layout, slots = cache.layout, StagingSlots(cache, 100)
    assert (slots.slot_bytes, slots.num_slots) == (24, 4)
    taken = slots.take(3)
    assert slots.num_free == 1 and slots.problems(taken) == [] and slots.problems(taken[:2])
    number = slots.numbers.number(taken[0], layout.incoming(0, 1, 2))
    slots.view(number)[:] = b"x" * 12
    assert bytes(slots.unit(taken[0], 24).numpy()[12:]) == b"x" * 12
    slots.give(taken)
    assert slots.problems([]) == []


@pytest.mark.parametrize(
    ("longest", "memory_bytes", "expected"),
    [
        (0, math.inf, 24),  # receives nothing
        (100, math.inf, LEAST_STAGING_BYTES),
        (10**9, math.inf, 10**9 * 24),
        (10**9, 4000, 1000),
        (100, 40, 24),
    ],
)
def test_staging_memory_is_for_the_longest_prompt(longest: int, memory_bytes: float, expected: int) -> None:
    assert staging_bytes(tiny_cache(), longest, memory_bytes) == expected


def test_staging_memory_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least the 24 bytes of a block"):
        StagingSlots(tiny_cache(), 23)
