from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.vllm.layout import (
    KVGroup,
    KVLayout,
    TransferName,
    base_of,
    can_skip_blocks,
    heads_of,
    num_ready,
    num_units,
    pairs,
    transfer_name,
    units_of,
)
from common.errors import WireError

FULL = KVGroup("full", 16, 8, 64)
WINDOW = KVGroup("window", 16, 8, 32, window=40)
STATE = KVGroup("state", 64, 1, 100)
POWERS = st.sampled_from([1, 2, 4, 8])
GROUPS = st.lists(
    st.builds(
        KVGroup,
        st.sampled_from(["full", "window", "state"]),
        st.sampled_from([4, 16]),
        st.just(1),
        st.just(8),
        window=st.integers(1, 50),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@given(heads=POWERS, prefill=POWERS, decode=POWERS)
def test_each_decode_rank_gets_each_of_its_heads_once_from_a_rank_that_has_it(
    heads: int, prefill: int, decode: int
) -> None:
    found = pairs(heads, prefill, decode)
    for rank in range(decode):
        got = [head for pair in found if pair.decode == rank for head in pair.heads]
        assert sorted(got) == list(heads_of(heads, decode, rank))
    for pair in found:
        assert set(pair.heads) <= set(heads_of(heads, prefill, pair.prefill))
    load = Counter(pair.prefill for pair in found for _ in pair.heads)
    assert max(load.values()) <= -(-max(heads, decode) // min(prefill, max(heads, decode)))  # spread evenly


@pytest.mark.parametrize(
    ("groups", "prefill", "decode", "why"),
    [
        ((FULL,), 1, 3, "8 KV heads cannot be divided among 3 ranks"),
        ((FULL,), 3, 1, "8 KV heads cannot be divided among 3 ranks"),
        ((FULL, KVGroup("full", 16, 2, 64)), 4, 1, "share heads of some groups only"),
    ],
)
def test_numbers_of_ranks_that_cannot_exchange_kv_are_refused(
    groups: tuple[KVGroup, ...], prefill: int, decode: int, why: str
) -> None:
    with pytest.raises(WireError, match=why):
        KVLayout(groups, "float32", prefill).sends_to(decode)
    with pytest.raises(WireError, match=why):
        KVLayout(groups, "float32", decode).receives_from(prefill)


@given(heads=POWERS, prefill=POWERS, decode=POWERS)
def test_both_ends_agree_on_the_bytes_of_a_transfer(heads: int, prefill: int, decode: int) -> None:
    group = KVGroup("full", 16, heads, 24)
    senders = [KVLayout((group,), "float32", prefill, rank) for rank in range(prefill)]
    receivers = [KVLayout((group,), "float32", decode, rank) for rank in range(decode)]
    for receiver in receivers:
        covered: list[int] = []
        for rank in receiver.receives_from(prefill):
            into, of = receiver.incoming(0, rank, prefill), senders[rank].outgoing(0, receiver.rank, decode)
            assert into.stop - into.start == of.stop - of.start
            assert [receiver.heads(0)[head] for head in into.heads] == [
                senders[rank].heads(0)[head] for head in of.heads
            ]
            assert receiver.rank in senders[rank].sends_to(decode)
            covered += range(into.start, into.stop)
        assert sorted(covered) == list(range(receiver.unit_bytes(0)))
    assert len({each.describe() for each in (*senders, *receivers)}) == 1


def test_ranks_that_share_no_heads_exchange_nothing() -> None:
    layout = KVLayout((FULL,), "float32", 8, 3)
    assert layout.sends_to(8) == (3,)
    with pytest.raises(WireError, match="share no heads"):
        layout.outgoing(0, 4, 8)


@given(groups=GROUPS, num_tokens=st.integers(1, 200))
def test_units_cover_what_the_next_token_needs(groups: tuple[KVGroup, ...], num_tokens: int) -> None:
    units = units_of(groups, num_tokens)
    assert len(set(units)) == len(units) == num_units(groups, num_tokens)
    for number, group in enumerate(groups):
        blocks = sorted(index for each, index in units if each == number)
        if group.kind == "state":
            assert blocks == [-1]
            continue
        first = 0 if group.kind == "full" else max(0, num_tokens + 1 - group.window)
        assert blocks == sorted({token // group.block_size for token in range(first, num_tokens)}) or (
            first >= num_tokens and blocks in ([], [(num_tokens - 1) // group.block_size])
        )


@given(groups=GROUPS, num_tokens=st.integers(1, 200))
def test_units_become_final_in_order(groups: tuple[KVGroup, ...], num_tokens: int) -> None:
    units = units_of(groups, num_tokens)
    counts = [0]
    for computed in range(num_tokens + 1):
        counts.append(num_ready(groups, units, num_tokens, computed, counts[-1]))
    del counts[0]
    assert counts == sorted(counts) and counts[-1] == len(units)
    for computed, count in itertools.islice(enumerate(counts), num_tokens):
        for number, index in units[:count]:
            assert groups[number].kind == "full" and (index + 1) * groups[number].block_size <= computed
        if count < len(units):
            number, index = units[count]
            assert groups[number].kind != "full" or (index + 1) * groups[number].block_size > computed


def test_units_of_several_groups_have_one_order() -> None:
    assert units_of((FULL, WINDOW, STATE), 50) == (
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, -1),
    )
    assert units_of((WINDOW,), 100) == ((0, 3), (0, 4), (0, 5), (0, 6))
    assert can_skip_blocks((FULL,)) and not can_skip_blocks((WINDOW,)) and not can_skip_blocks((FULL, FULL))


@given(request_id=st.text(min_size=1, max_size=300), rank=st.integers(0, 7))
def test_names_of_transfers_fit_and_are_read_back(request_id: str, rank: int) -> None:
    name = transfer_name(request_id, rank, 8, 3)
    assert len(name) <= 256
    assert TransferName.parse(name) == TransferName(base_of(request_id), rank, 8, 3)


@pytest.mark.parametrize("name", ["a", "a/1.2", "a/1.1.0", "a/2.1.0", "/0.1.0", "a/0.9999.0", "a/0.1.0\n"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(WireError):
        TransferName.parse(name)
