"""Which blocks a windowed sequence needs, against the definition: the keys that each token sees."""

from __future__ import annotations

import random

import pytest

from common.blocks.block_hash import block_hashes
from common.blocks.window import HOLE, CachedPrefix, Window
from common.engine.kv.block_pool import BlockPool
from common.errors import BlockError

SIZES = [(1, 1), (1, 4), (4, 4), (5, 4), (6, 4), (7, 4), (20, 16), (40, 16), (3, 16)]


def seen(window: int, position: int) -> range:
    """The keys that the token at a position sees."""
    return range(max(0, position + 1 - window), position + 1)


@pytest.mark.parametrize(("window", "size"), SIZES)
def test_the_first_block_is_that_of_the_first_key_that_is_seen(window: int, size: int) -> None:
    for position in range(100):
        assert Window(window, size).first_block(position) == seen(window, position)[0] // size


@pytest.mark.parametrize(("window", "size"), SIZES)
@pytest.mark.parametrize("step", [1, 2, 5, 16, 33])
def test_no_step_needs_more_blocks_than_are_counted_for_it(window: int, size: int, step: int) -> None:
    """And some step needs so many."""
    counts = []
    for start in range(120):
        keys = range(seen(window, start)[0], start + step)
        counts.append(keys[-1] // size - keys[0] // size + 1)
    assert max(counts) == Window(window, size).span_blocks(step)


def test_a_short_sequence_has_no_more_blocks_than_tokens_fill() -> None:
    window = Window(40, 16)
    assert [window.most_blocks(count) for count in (1, 16, 17, 64, 65, 1000)] == [1, 1, 2, 4, 4, 4]
    assert Window(0, 16).most_blocks(1000) == 63 and not Window(0, 16)
    assert Window(0, 16).first_block(1000) == 0


def test_a_cache_that_holds_a_window_takes_any_sequence() -> None:
    window = Window(40, 16)
    assert window.longest(window.span_blocks(1) + 2, 10_000) == 10_000
    assert window.longest(window.span_blocks(1) + 1, 10_000) == 80
    assert Window(0, 16).longest(100, 10_000) == 1600


@pytest.mark.parametrize(("window", "size"), SIZES)
def test_a_hit_is_the_longest_prefix_whose_last_window_is_cached(window: int, size: int) -> None:
    """Against trying all lengths, for any set of blocks that are cached."""
    source, view = random.Random(window), Window(window, size)
    hashes = block_hashes(list(range(24 * size)), size)
    for _ in range(200):
        pool = BlockPool(32, size)
        share = source.random()
        for block_hash in hashes:
            (block,) = pool.allocate(1)
            pool.wrote([block], 0, size)
            if source.random() < share:
                pool.publish(block, block_hash)
        held = [bool(pool.match([block_hash])) for block_hash in hashes]
        ends = [end for end in range(25) if all(held[index] for index in range(view.first_block(end * size), end))]
        found = pool.match_window(hashes, view)
        assert found.end == max(ends) and found.first == view.first_block(found.end * size)
        assert found.blocks == [pool.match([block_hash])[0] for block_hash in hashes[found.first : found.end]]


def test_without_a_window_a_hit_begins_with_the_first_block() -> None:
    pool, hashes = BlockPool(8, 4), block_hashes(list(range(16)), 4)
    blocks = pool.allocate(4)
    pool.wrote(blocks, 0, 16)
    for block, block_hash in list(zip(blocks, hashes, strict=True))[1:]:
        pool.publish(block, block_hash)
    assert pool.match_window(hashes, Window(0, 4)) == CachedPrefix(0, [])
    assert pool.match_window(hashes, Window(8, 4)) == CachedPrefix(2, blocks[2:])


@pytest.mark.parametrize(
    ("length", "decoding", "prefilling", "sent"),
    [(4096, 512, 512, 512), (8192, 514, 770, 512), (32768, 514, 770, 512)],
)
def test_the_megabytes_of_mistral_in_docs_models(length: int, decoding: int, prefilling: int, sent: int) -> None:
    """A block of 16 tokens has 2 MiB."""
    window = Window(4096, 16)
    assert 2 * window.most_blocks(length) == decoding
    assert 2 * window.most_blocks(length, 2048) == prefilling
    assert 2 * (length // 16 - window.first_block(length)) == sent


def test_a_hole_is_nobodys_block() -> None:
    """-1 would be the last one."""
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    pool.wrote(blocks, 0, 8)
    for use in (
        lambda: pool.release([HOLE]),
        lambda: pool.wrote([HOLE], 0, 4),
        lambda: pool.publish(HOLE, b"hash"),
    ):
        with pytest.raises(BlockError, match="block -1"):
            use()
    assert pool.check_integrity([blocks]).owned == 2
