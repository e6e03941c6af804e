"""Processes of two neighbouring versions understand each other."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import msgspec
import pytest

from common.wire.codec import decode, encode, num_fields
from common.wire.message_fields import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    UNSTATED_PROTOCOL_VERSION,
    common_version,
    pack_tokens,
    version_names,
)
from common.wire.messages import AnyMessage, KVPeer, KVTarget, PrefillRequest, RouterHello
from common.wire.sampling_params import SamplingParams

MESSAGES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyMessage)


def structs_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    """All structs in a type, and in the types of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for field in msgspec.structs.fields(annotation):
            yield from structs_in(field.type)
    for part in typing.get_args(annotation):
        yield from structs_in(part)


@pytest.mark.parametrize("struct", sorted(set(structs_in(AnyMessage)), key=lambda one: one.__name__))
def test_new_fields_stand_last_and_have_defaults(struct: type[msgspec.Struct]) -> None:
    for version in range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION):
        num_old, fields = num_fields(struct, version), msgspec.structs.fields(struct)
        assert not any(field.required for field in fields[num_old:])
        head = msgspec.defstruct(
            "Head", [(field.name, field.type) for field in fields[:num_old]], array_like=True, kw_only=True
        )
        assert num_fields(head, version) == num_old


def test_an_older_peer_gets_a_message_without_newer_fields() -> None:
    message = PrefillRequest(
        request_id="a", attempt=1, prompt=pack_tokens([1]), params=SamplingParams(max_tokens=1),
        decode=KVTarget("d", 7, "tcp://h", PROTOCOL_VERSION), peer=KVPeer("p", 8, "tcp://i", 9, PROTOCOL_VERSION),
    )  # fmt: skip
    assert decode(encode(message)) == message
    assert decode(encode(message, PROTOCOL_VERSION + 1)) == message
    old = UNSTATED_PROTOCOL_VERSION
    expected = msgspec.structs.replace(
        message, decode=KVTarget("d", 7, "tcp://h", old), peer=KVPeer("p", 8, "tcp://i", 9, old)
    )
    sent = encode(message, old)
    assert decode(sent) == expected
    assert msgspec.msgpack.decode(sent[:-8])[5] == ["d", 7, "tcp://h"]
    assert msgspec.msgpack.decode(encode(RouterHello(router_id="r", epoch=1, protocol=13), old)[:-8])[1:] == [
        "r", 1, OLDEST_PROTOCOL_VERSION, False,
    ]  # fmt: skip


def test_the_highest_common_version_is_used() -> None:
    new, old = PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION
    assert (common_version(old, new), common_version(old - 1, old), common_version(new, new + 1)) == (new, old, new)
    assert (common_version(new + 1, new + 2), common_version(old - 2, old - 1)) == (0, 0)
    assert new - old <= 1  # a release supports the one before it
    assert (version_names(3, 3), version_names(3, 4)) == ("version 3", "versions 3 to 4")
