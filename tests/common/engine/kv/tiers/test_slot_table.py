"""Which block makes room in a tier."""

from __future__ import annotations

from common.engine.kv.tiers.slot_table import SlotTable


def filled(*hashes: bytes) -> SlotTable:
    table = SlotTable(len(hashes))
    for block_hash in hashes:
        assert (room := table.allocate()) is not None
        table.fill(room[0], block_hash)
    return table


def test_what_was_used_longest_ago_makes_room() -> None:
    table = filled(b"a", b"b", b"c")
    table.touch(b"a")
    table.touch(b"absent")
    assert table.allocate() == (1, b"b") and b"b" not in table
    table.fill(1, b"d")
    assert table.hashes() == [b"c", b"a", b"d"]


def test_what_is_being_read_keeps_its_place() -> None:
    table = filled(b"a", b"b")
    assert (table.begin_read(b"a"), table.begin_read(b"b"), table.begin_read(b"x")) == (0, 1, None)
    assert table.begin_read(b"a") == 0
    assert table.allocate() is None
    table.end_read(b"a")
    assert table.allocate() is None  # the other read goes on
    table.end_read(b"a")
    assert table.allocate() == (0, b"a")


def test_a_dropped_block_leaves_its_slot() -> None:
    table = filled(b"a", b"b")
    assert (table.drop(b"a"), table.drop(b"a"), len(table)) == (0, None, 1)
    assert table.allocate() == (0, b"")


def test_what_was_found_comes_in_the_order_of_its_writing() -> None:
    table = SlotTable(4, [(9, 1, b"a"), (3, 0, b"b"), (5, 3, b"c"), (2, 2, b"a")])
    assert table.hashes() == [b"b", b"c", b"a"]
    assert table.num_leading([b"a", b"b", b"x", b"c"]) == 2
    assert [table.allocate(), table.allocate(), table.allocate()] == [(2, b""), (0, b"b"), (3, b"c")]
