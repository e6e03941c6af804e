from hypothesis import given
from hypothesis import strategies as st

from common.kv.block_hash import block_hashes
from router.fleet.prefix_index import PrefixIndex


def test_a_shared_prefix_is_a_hit():
    index = PrefixIndex()
    index.insert("a", block_hashes(range(64), 16, ""))
    assert index.num_hits("a", block_hashes([*range(40), *range(24)], 16, "")) == 2
    assert index.num_hits("b", block_hashes(range(64), 16, "")) == 0


def test_salts_do_not_share():
    index = PrefixIndex()
    index.insert("a", block_hashes(range(64), 16, "one"))
    assert index.num_hits("a", block_hashes(range(64), 16, "two")) == 0


def test_clear_forgets_one_worker():
    index = PrefixIndex()
    for worker in "ab":
        index.insert(worker, [b"1", b"2"])
    index.clear("a")
    assert (index.num_hits("a", [b"1"]), index.num_hits("b", [b"1"])) == (0, 1)


def test_the_least_recently_used_chain_goes_first_and_from_its_tail():
    index = PrefixIndex(capacity=4)
    index.insert("a", [b"1", b"2"])
    index.insert("a", [b"3", b"4"])
    index.insert("a", [b"5"])
    assert [index.num_hits("a", chain) for chain in ([b"1", b"2"], [b"3", b"4"], [b"5"])] == [1, 2, 1]


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(chains, st.integers(1, 12))
def test_hits_are_what_a_plain_scan_finds_and_memory_is_bounded(prompts, capacity):
    index = PrefixIndex(capacity)
    for prompt in prompts:
        index.insert("a", block_hashes(prompt, 1, ""))
    assert index.size("a") <= capacity
    for prompt in prompts:
        hashes = block_hashes(prompt, 1, "")
        known = index._blocks["a"]
        scan = next((i for i, digest in enumerate(hashes) if digest not in known), len(hashes))
        assert index.num_hits("a", hashes) == scan
