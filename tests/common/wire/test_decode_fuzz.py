"""The decoder against random, bent and hostile bytes: a message that means what it says, or a WireError, cheaply."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WireError
from common.wire.codec import CHECKSUM_BYTES, encode, seal, unpack
from common.wire.messages import AnyMessage

from .test_messages import FUZZ, MESSAGES

ENCODED = [encode(message)[:-CHECKSUM_BYTES] for message in MESSAGES]
FIELDS = [msgspec.msgpack.decode(data) for data in ENCODED]
ODD = (None, True, -1, 0, 2**62 + 1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "x" * 300, b"", b"x" * 5)
NUM_INPUTS = 1_000_000


def taken(data: bytes) -> AnyMessage | None:
    """The message in `data`, which must survive being sent on; None when it was refused, as it should be."""
    try:
        message = unpack(data)
    except WireError:
        return None
    again = encode(message)
    assert unpack(again[:-CHECKSUM_BYTES]) == message
    return message


def odd_value(rng: random.Random) -> object:
    value: object = rng.choice(ODD)
    for _ in range(rng.randrange(4)):
        value = [value] * rng.randrange(4)
    return value


def replaced(value: object, rng: random.Random, depth: int = 0) -> object:
    """`value` with something else at a random place, at most six arrays deep."""
    if not isinstance(value, list) or not value or depth == 6 or rng.random() < 0.15:
        return odd_value(rng)
    copy = list(value)
    index = rng.randrange(len(copy))
    copy[index] = replaced(copy[index], rng, depth + 1)
    return copy


def bent(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def with_other_field(data: bytes, rng: random.Random) -> bytes:
    return msgspec.msgpack.encode(replaced(FIELDS[rng.randrange(len(FIELDS))], rng))


def with_other_tag(data: bytes, rng: random.Random) -> bytes:
    fields = FIELDS[rng.randrange(len(FIELDS))]
    return msgspec.msgpack.encode([rng.randrange(60), *fields[1 : rng.randrange(len(fields)) + 1]])


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def lengthened(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return (
        data[:at] + rng.choice((b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91")) + data[at:]
    )


def spliced(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(ENCODED)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(40))


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    bent,
    with_other_field,
    with_other_tag,
    cut,
    lengthened,
    spliced,
    noise,
)


def fuzz(num_inputs: int, seed: int) -> tuple[int, int]:
    """How many of the inputs were taken and refused."""
    rng = random.Random(seed)
    num_taken = 0
    for number in range(num_inputs):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        num_taken += taken(mutate(rng.choice(ENCODED), rng)) is not None
    return num_taken, num_inputs - num_taken


def test_mutations_are_taken_whole_or_refused() -> None:
    num_taken, num_refused = fuzz(5_000, seed=1)
    assert num_taken > 200 and num_refused > 200  # both ways are really tried


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_mutations_are_taken_whole_or_refused() -> None:
    num_taken, num_refused = fuzz(NUM_INPUTS, seed=2)
    assert num_taken > 0.04 * NUM_INPUTS and num_refused > 0.04 * NUM_INPUTS


VALUES = st.recursive(st.sampled_from(ODD) | st.integers() | st.text(max_size=9), lambda v: st.lists(v, max_size=5))


@given(st.sampled_from(FIELDS), st.data())
@FUZZ
def test_any_value_in_any_field_is_taken_whole_or_refused(fields: list[object], data: st.DataObject) -> None:
    changed = list(fields)
    changed[data.draw(st.integers(0, len(fields) - 1))] = data.draw(VALUES)
    try:
        packed = msgspec.msgpack.encode(changed)
    except OverflowError:  # integers beyond what msgpack knows
        return
    taken(packed)


KIB = 1024
SIZE = 256 * KIB


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xdd\x00\x03\xff\xff" * 1000 + b"\x90" * SIZE, id="nested arrays of declared length"),
        pytest.param(b"\xdd\x00\x04\x00\x00" + b"\x90" * SIZE, id="array of empty arrays"),
        pytest.param(b"\x95\x03\xa1a\x00\xdd\x00\x04\x00\x00" + b"\x90" * SIZE, id="prompt of empty arrays"),
        pytest.param(b"\x94\x16\xa1w\x01\xdd\x00\x04\x00\x00" + b"\x90" * SIZE, id="outputs of empty arrays"),
        pytest.param(b"\x91" * SIZE, id="depth"),
        pytest.param(b"\x93\x02\xa1w" + b"\x91" * SIZE, id="depth in a field of a later version"),
        pytest.param(b"\x93\x02\xa1w" + b"\x81\x01" * SIZE, id="depth of maps in a field of a later version"),
        pytest.param(b"\x94\x16\xa1w\x01\xdd\xff\xff\xff\xff" + b"\x90" * SIZE, id="4 billion outputs"),
        pytest.param(b"\x94\x29\xa1a\x00\x00\xdd\xff\xff\xff\xff" + b"\x05" * SIZE, id="4 billion checksums"),
        pytest.param(b"\x95\x03\xa1a\x00\xc6\xff\xff\xff\xff" + b"x" * SIZE, id="4 GB prompt"),
    ],
)
def test_what_is_refused_costs_next_to_nothing(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SIZE


def test_what_is_taken_costs_a_small_multiple_of_its_size() -> None:
    tokens = b"\x94\x16\xa1w\x01\x91\x94\xa1a\x00\x00\xdd\x00\x01\x00\x00" + b"\xcd\xff\xff" * 2**16
    tracemalloc.start()
    message = taken(tokens)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message is not None and peak < 32 * len(tokens)
    assert len(seal(tokens)) == len(tokens) + CHECKSUM_BYTES
