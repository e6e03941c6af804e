"""Chained block hashes: equal hash, equal history."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.blocks.block_hash import DIGEST_BYTES, BlockHasher, block_hashes

TOKENS = list(range(40))


def test_only_full_blocks_are_hashed() -> None:
    assert [len(block_hashes(TOKENS[:n], 16)) for n in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


def test_hash_has_fixed_size() -> None:
    assert {len(h) for h in block_hashes(TOKENS, 8)} == {DIGEST_BYTES}


def test_equal_prefixes_share_hashes_up_to_the_difference() -> None:
    other = [*TOKENS[:20], 999, *TOKENS[21:]]
    mine, theirs = block_hashes(TOKENS, 8), block_hashes(other, 8)
    assert mine[:2] == theirs[:2]
    assert all(a != b for a, b in zip(mine[2:], theirs[2:], strict=True))


def test_equal_block_after_another_history_differs() -> None:
    assert block_hashes([1, 2, 5, 6], 2)[1] != block_hashes([3, 4, 5, 6], 2)[1]


def test_salts_separate_tenants() -> None:
    assert not set(block_hashes(TOKENS, 8, "a")) & set(block_hashes(TOKENS, 8, "b"))


def test_adapters_share_no_block_with_the_base_model_or_with_each_other() -> None:
    roots = [("", ""), ("", "0" * 32), ("", "1" * 32), ("a", "0" * 32), ("0" * 32, "")]
    chains = [BlockHasher(8, salt, adapter).extend(TOKENS) for salt, adapter in roots]
    assert len({digest for chain in chains for digest in chain}) == sum(len(chain) for chain in chains)
    assert chains[0] == block_hashes(TOKENS, 8), "the base model's hashes have changed"


def test_salt_may_hold_any_text() -> None:
    assert block_hashes(TOKENS, 8, "\udcff") != block_hashes(TOKENS, 8, "")


def test_block_borders_matter() -> None:
    assert not set(block_hashes(TOKENS, 8)) & set(block_hashes(TOKENS, 4)[1::2])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(1, 9))
@settings(derandomize=True, deadline=None)
def test_growing_gives_the_hashes_of_the_whole(tokens: list[int], cuts: list[int], block_size: int) -> None:
    hasher = BlockHasher(block_size)
    for cut in sorted(cuts):
        hasher.extend(tokens[:cut])
    assert hasher.extend(tokens) == block_hashes(tokens, block_size)
