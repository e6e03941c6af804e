"""Owners of blocks: allocation, sharing, the LRU order of the cache, and a model of it all."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.kv.block_pool import BlockCounts, BlockPool
from common.errors import BlockError

from ....examples import examples


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks published under `numbers`, in one sequence, and released."""
    blocks = pool.allocate(len(numbers))
    pool.wrote(blocks, 0, len(blocks))
    for block, number in zip(blocks, numbers, strict=True):
        pool.publish(block, digest(number))
    pool.release(blocks)
    return blocks


def test_counts_add_up() -> None:
    pool = BlockPool(8)
    cached(pool, 1, 2)
    pool.allocate(3)
    assert pool.counts == BlockCounts(free=3, cached=2, owned=3)
    assert pool.counts.total == 8


def test_more_than_available_is_refused_with_the_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(BlockError, match="cannot allocate 2 blocks: 1 of 4"):
        pool.allocate(2)
    assert pool.counts.owned == 3


def test_a_pool_has_a_block() -> None:
    with pytest.raises(BlockError, match="not 0"):
        BlockPool(0)


def test_unpublished_blocks_become_free() -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(2))
    assert pool.counts == BlockCounts(free=2, cached=0, owned=0)


def test_match_finds_the_longest_prefix() -> None:
    pool = BlockPool(8)
    blocks = cached(pool, 1, 2, 3)
    assert pool.match([digest(1), digest(2), digest(9), digest(3)]) == blocks[:2]
    assert pool.match([digest(9), digest(1)]) == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2)
    assert not set(pool.allocate(2)) & set(blocks)
    assert pool.match([digest(1), digest(2)]) == blocks


def test_eviction_takes_the_longest_unused_and_of_a_sequence_its_end() -> None:
    pool = BlockPool(4)
    old, new = cached(pool, 1, 2), cached(pool, 3, 4)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.match([digest(3)]) == new[:1]


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    first, second = cached(pool, 1), cached(pool, 2)
    pool.acquire(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_owned_blocks_are_never_evicted() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, 1)
    pool.acquire(blocks)
    assert pool.num_available == 1
    assert pool.allocate(1) != blocks


def test_a_shared_block_stays_until_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, 1)
    pool.acquire(blocks)
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.counts.owned == 1
    pool.release(blocks)
    assert pool.counts.cached == 1


def test_reclaimed_blocks_are_those_nobody_owns() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2)
    pool.acquire(blocks[:1])
    assert pool.num_reclaimed(blocks) == 1


def test_the_first_block_of_a_hash_wins() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.wrote([first, second], 0, 2)
    pool.publish(first, digest(1))
    pool.publish(second, digest(1))
    assert pool.match([digest(1)]) == [first]
    pool.release([first, second])
    assert pool.counts == BlockCounts(free=3, cached=1, owned=0)


def test_a_block_keeps_its_first_hash() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.wrote([block], 0, 1)
    pool.publish(block, digest(1))
    pool.publish(block, digest(2))
    assert pool.match([digest(2)]) == []


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(BlockError, match="has no owner"):
        pool.release(blocks)


def test_publishing_what_nobody_owns_is_refused() -> None:
    with pytest.raises(BlockError, match="has no owner"):
        BlockPool(2).publish(0, digest(1))


def test_a_block_with_an_unwritten_slot_is_not_published() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    pool.wrote(blocks, 0, 7)
    pool.publish(blocks[0], digest(1))
    with pytest.raises(BlockError, match="only 3 of 4 slots are written"):
        pool.publish(blocks[1], digest(2))
    pool.wrote(blocks, 7, 8)
    pool.publish(blocks[1], digest(2))
    assert pool.match([digest(1), digest(2)]) == blocks


def test_slots_are_written_in_order_and_by_owners() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    with pytest.raises(BlockError, match="from slot 2 but has 0 of 4 slots"):
        pool.wrote(blocks, 2, 4)
    pool.release(blocks)
    with pytest.raises(BlockError, match="0 owners"):
        pool.wrote(blocks, 0, 1)


def test_what_an_earlier_owner_wrote_does_not_count() -> None:
    pool = BlockPool(1, 2)
    for _ in range(2):
        blocks = pool.allocate(1)
        with pytest.raises(BlockError, match="only 0 of 2"):
            pool.publish(blocks[0], digest(1))
        pool.wrote(blocks, 0, 2)
        pool.release(blocks)


def test_integrity_counts_the_slots_of_published_blocks() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.wrote(blocks, 0, 2)
    pool.publish(blocks[0], digest(1))
    pool._num_written[blocks[0]] = 1
    with pytest.raises(BlockError, match="1 published blocks have unwritten slots"):
        pool.check_integrity([blocks])


def test_acquiring_a_free_block_is_refused() -> None:
    with pytest.raises(BlockError, match="is free"):
        BlockPool(2).acquire([1])


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    cached(pool, 1, 2)
    assert pool.match([digest(1)]) == []
    assert pool.counts.free == 2


def test_reset_forgets_owned_blocks_too() -> None:
    pool = BlockPool(4)
    cached(pool, 1, 2)
    mine = pool.allocate(1)
    pool.wrote(mine, 0, 1)
    pool.publish(mine[0], digest(3))
    pool.reset_cache()
    assert pool.counts == BlockCounts(free=3, cached=0, owned=1)
    assert pool.match([digest(3)]) == []
    pool.release(mine)
    assert pool.check_integrity([]) == BlockCounts(free=4, cached=0, owned=0)


def test_integrity_names_the_blocks_and_numbers() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(BlockError, match=r"1 of 4 blocks .*1 refs, 0 owners"):
        pool.check_integrity([blocks[:1]])
    with pytest.raises(BlockError, match="1 refs, 2 owners"):
        pool.check_integrity([blocks, blocks[:1]])


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, publish and leave in any order; the pool agrees with who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.owners: list[list[int]] = []
        self.contents: dict[int, int] = {}
        self.next_content = 0

    @rule(numbers=st.lists(st.integers(0, 6), max_size=5), extra=st.integers(0, 4))
    def arrive(self, numbers: list[int], extra: int) -> None:
        hits = self.pool.match([digest(n) for n in numbers])
        assert [self.contents[block] for block in hits] == numbers[: len(hits)]
        if extra > self.pool.num_available - self.pool.num_reclaimed(hits):
            return
        self.pool.acquire(hits)
        new = self.pool.allocate(extra)
        assert not set(new) & {block for owner in self.owners for block in owner}
        for block in new:
            self.next_content -= 1
            self.contents[block] = self.next_content
        self.owners.append(hits + new)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), number=st.integers(0, 6))
    def publish(self, data: st.DataObject, number: int) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        private = [block for block in owner if self.contents[block] < 0]
        if private:
            self.pool.wrote(private[:1], 0, 1)
            known = self.pool.match([digest(number)])
            self.pool.publish(private[0], digest(number))
            if not known:
                self.contents[private[0]] = number

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        for block in {block for owner in self.owners for block in owner}:
            self.next_content -= 1
            self.contents[block] = self.next_content

    @invariant()
    def ownership_holds(self) -> None:
        counts = self.pool.check_integrity(self.owners)
        assert counts.owned == len({block for owner in self.owners for block in owner})

    def teardown(self) -> None:
        for owner in self.owners:
            self.pool.release(owner)
        assert self.pool.check_integrity([]).owned == 0


TestPoolMachine = pytest.mark.slow(PoolMachine.TestCase)
TestPoolMachine.settings = settings(derandomize=True, deadline=None, max_examples=examples(60), stateful_step_count=40)
