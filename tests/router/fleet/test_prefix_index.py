"""What workers report that they hold, and what they are expected to report."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from common.blocks.block_hash import block_hashes
from common.blocks.window import Window
from router.fleet.prefix_index import PrefixIndex

from ...examples import examples


def hits(index: PrefixIndex, address: str, hashes: Sequence[bytes]) -> int:
    return index.hits(hashes).num_blocks(address)


def shorts(hashes: Sequence[bytes]) -> list[bytes]:
    return [digest[:8] for digest in hashes]


CHAIN = block_hashes(range(64), 16, "")


def test_a_shared_prefix_is_a_hit_whether_reported_or_expected() -> None:
    index = PrefixIndex()
    index.store("a", shorts(CHAIN))
    index.expect("b", CHAIN, 0.0)
    found = index.hits(block_hashes([*range(40), *range(24)], 16, ""))
    assert [found.num_blocks(address) for address in "abc"] == [2, 2, 0]


def test_salts_do_not_share() -> None:
    index = PrefixIndex()
    index.expect("a", block_hashes(range(64), 16, "one"), 0.0)
    assert hits(index, "a", block_hashes(range(64), 16, "two")) == 0


def test_clear_forgets_one_worker() -> None:
    index = PrefixIndex()
    for worker in "ab":
        index.store(worker, [b"1", b"2"])
    index.clear("a")
    assert (hits(index, "a", [b"1"]), hits(index, "b", [b"1"])) == (0, 1)
    index.store("c", [b"2"])
    assert [hits(index, worker, [b"1", b"2"]) for worker in "abc"] == [0, 2, 0], "its bit was given to another"
    index.clear_all()
    assert index.is_empty and hits(index, "b", [b"1"]) == 0


def test_a_block_in_the_middle_that_is_gone_ends_the_hit() -> None:
    index = PrefixIndex()
    index.store("a", shorts(CHAIN))
    index.remove("a", shorts(CHAIN[1:2]))
    assert hits(index, "a", CHAIN) == 1


def test_expected_blocks_that_are_not_reported_are_forgotten() -> None:
    index = PrefixIndex(expected_s=10.0)
    index.expect("a", CHAIN, 0.0)
    index.store("a", shorts(CHAIN[:1]))
    index.expect("a", CHAIN[:2], 5.0)
    index.expire(9.9)
    assert hits(index, "a", CHAIN) == 4
    index.expire(10.0)
    assert hits(index, "a", CHAIN) == 2, "one is reported, one was expected again"
    index.expire(15.0)
    assert (hits(index, "a", CHAIN), index.size("a")) == (1, 1)


def test_a_report_ends_an_expectation() -> None:
    index = PrefixIndex()
    index.expect("a", CHAIN, 0.0)
    index.remove("a", shorts(CHAIN[2:]))
    assert hits(index, "a", CHAIN) == 2


def test_a_snapshot_replaces_reports_and_leaves_expectations() -> None:
    index = PrefixIndex()
    index.store("a", shorts(CHAIN[:2]))
    index.expect("a", CHAIN[2:3], 0.0)
    index.clear_stored("a")
    assert hits(index, "a", CHAIN) == 0 and index.size("a") == 1
    index.store("a", shorts(CHAIN[:2]))
    assert hits(index, "a", CHAIN) == 3


def test_a_worker_takes_no_more_than_its_share() -> None:
    index = PrefixIndex(capacity=3)
    index.store("a", [b"1", b"2", b"3", b"4"])
    assert hits(index, "a", [b"1", b"2", b"3", b"4"]) == 3
    index.remove("a", [b"1"])
    index.store("a", [b"4"])
    assert hits(index, "a", [b"2", b"3", b"4"]) == 3
    index.expect("b", [b"1", b"2", b"3", b"4"], 0.0, capacity=2)
    index.expect("b", [b"5"], 0.0, capacity=2)
    assert index.size("b") == 2, "those expected first are forgotten first"


def test_workers_share_what_the_index_keeps_in_all() -> None:
    index = PrefixIndex(total=6)
    for address in "abc":
        index.store(address, [bytes([n]) for n in range(9)])
    assert [index.size(address) for address in "abc"] == [6, 0, 0], "the first took all while it was alone"
    index.remove("a", [bytes([n]) for n in range(5)])
    for address in "abc":
        index.store(address, [bytes([n]) for n in range(9)])
    assert [index.size(address) for address in "abc"] == [2, 2, 2]
    index.clear("b")
    index.clear_stored("c")
    index.store("d", [b"x", b"y", b"z"])
    assert index.size("d") == 2 and index.size("b") == index.size("c") == 0


def test_the_workers_with_the_longest_hits_come_first() -> None:
    index = PrefixIndex()
    for address, count in (("a", 2), ("b", 4), ("c", 2), ("d", 3)):
        index.store(address, shorts(CHAIN[:count]))
    levels = [sorted(index.addresses(mask)) for mask in index.hits(CHAIN).levels()]
    assert levels == [["b"], ["b", "d"], ["a", "b", "c", "d"]]
    assert not index.hits([]) and not index.hits([b"unknown"])


changes = st.tuples(st.sampled_from("abc"), st.sampled_from(["store", "remove", "expect", "clear"]), st.integers(1, 6))


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(changes, st.lists(st.integers(0, 1), max_size=5)), max_size=30))
def test_hits_are_what_a_plain_scan_finds(acts: list[tuple[tuple[str, str, int], list[int]]]) -> None:
    index, model = PrefixIndex(expected_s=100.0), {address: (set(), set()) for address in "abc"}
    for now, ((address, act, first), prompt) in enumerate(acts):
        chain = block_hashes(prompt, 1, "")
        stored, expected = model[address]
        some = chain[:first]
        if act == "store":
            index.store(address, shorts(some))
            stored |= set(some)
            expected -= set(some)
        elif act == "remove":
            index.remove(address, shorts(some))
            stored -= set(some)
            expected -= set(some)
        elif act == "expect":
            index.expect(address, some, float(now))
            expected |= set(some) - stored
        else:
            index.clear(address)
            model[address] = (set(), set())
    for number in range(2**5):
        chain = block_hashes([number >> place & 1 for place in range(5)], 1, "")
        found = index.hits(chain)
        for address, (stored, expected) in model.items():
            held = stored | expected
            scan = next((i for i, digest in enumerate(chain) if digest not in held), len(chain))
            assert found.num_blocks(address) == scan


def test_what_is_in_a_tier_is_reached_but_no_hit() -> None:
    index = PrefixIndex()
    index.store("a", shorts(CHAIN[:1]))
    index.store_below("a", shorts(CHAIN[1:3]))
    index.store_below("b", shorts(CHAIN[:2]))
    index.store("c", shorts(CHAIN[:2]))
    found = index.hits(CHAIN)
    assert [found.num_blocks(worker) for worker in "abcd"] == [1, 0, 2, 0]
    assert [found.num_reachable(worker) for worker in "abcd"] == [3, 2, 2, 0]
    assert set(index.addresses(list(found.levels())[-1])) == {"a", "b", "c"}
    index.remove("a", shorts(CHAIN[2:3]))
    assert index.hits(CHAIN).num_reachable("a") == 2
    for worker in "ab":
        index.clear(worker)
    assert index.hits(CHAIN).reach is None
    index.clear_stored("c")
    assert index.is_empty


def test_tiers_count_for_the_bounds() -> None:
    index = PrefixIndex(capacity=2, total=3)
    index.store_below("a", shorts(CHAIN))
    index.store_below("b", shorts(CHAIN))
    assert [index.hits(CHAIN).num_reachable(worker) for worker in "ab"] == [2, 1]
    index.clear("a")
    index.store_below("b", shorts(CHAIN))
    assert index.hits(CHAIN).num_reachable("b") == 2


def test_a_worker_goes_on_behind_the_blocks_of_a_window() -> None:
    """Windows of 40 tokens: the last three blocks, or four, in front of the next token."""
    index, window = PrefixIndex(), Window(40, 16)
    chain = block_hashes(range(160), 16, "")
    index.store("all", shorts(chain))
    index.store("tail", shorts(chain[5:9]))
    index.store("begin", shorts(chain[:2]))
    index.store("last", shorts(chain[9:]))
    found = index.hits(chain, window)
    assert [found.num_blocks(name) for name in ("all", "tail", "begin", "last", "none")] == [10, 9, 2, 0, 0]
    assert [sorted(index.addresses(mask)) for mask in found.levels()] == [
        ["all"],
        ["all", "tail"],
        ["all", "begin", "tail"],
    ]
    assert index.hits(chain, Window(0, 16)).num_blocks("tail") == 0
    assert not index.hits([], window)


def test_blocks_in_a_tier_count_for_a_window() -> None:
    index, window = PrefixIndex(), Window(40, 16)
    chain = block_hashes(range(160), 16, "")
    index.store("a", shorts(chain[5:7]))
    index.store_below("a", shorts(chain[7:9]))
    found = index.hits(chain, window)
    assert found.num_blocks("a") == 0 and found.num_reachable("a") == 9
