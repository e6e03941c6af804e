"""Processes of two neighbouring versions understand each other."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import msgspec
import pytest

from common.wire.codec import CHECKSUM_BYTES, decode, encode
from common.wire.message_fields import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    common_version,
    version_names,
)
from common.wire.messages import AnyMessage, Message, RouterHello

from ... import previous_version
from ...fake_worker import hello_of

MESSAGES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyMessage)


def structs_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    """All structs in a type, and in the types of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for field in msgspec.structs.fields(annotation):
            yield from structs_in(field.type)
    for part in typing.get_args(annotation):
        yield from structs_in(part)


def head_of(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The struct as the previous version has it."""
    known = [
        (field.name, field.type) for field in msgspec.structs.fields(struct)[: previous_version.num_fields(struct)]
    ]
    return msgspec.defstruct("Head", known, array_like=True, kw_only=True, tag=struct.__struct_config__.tag)


@pytest.mark.parametrize("struct", sorted(set(structs_in(AnyMessage)), key=lambda one: one.__name__))
def test_new_fields_stand_last_and_have_defaults(struct: type[msgspec.Struct]) -> None:
    num_old = previous_version.num_fields(struct)
    assert not any(field.required for field in msgspec.structs.fields(struct)[num_old:])
    assert previous_version.num_fields(head_of(struct)) == num_old
    assert struct.__struct_config__.array_like
    assert not struct.__struct_config__.forbid_unknown_fields  # readers ignore fields that they do not know


@pytest.mark.parametrize(
    "message",
    [hello_of(layout=(("dtype", "float32"),)), RouterHello(router_id="r", epoch=1, protocol=PROTOCOL_VERSION)],
)
def test_both_versions_read_a_message_of_the_other(message: Message) -> None:
    head = head_of(type(message))
    read = msgspec.msgpack.decode(encode(message)[:-CHECKSUM_BYTES], type=head)
    told = {name: getattr(message, name) for name in head.__struct_fields__}
    assert msgspec.structs.asdict(read) == told != msgspec.structs.asdict(message)
    assert decode(previous_version.encode(message)) == type(message)(**told)
    assert decode(encode(message)) == message


def test_the_highest_common_version_is_used() -> None:
    new, old = PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION
    assert (common_version(old, new), common_version(old - 1, old), common_version(new, new + 1)) == (new, old, new)
    assert (common_version(new + 1, new + 2), common_version(old - 2, old - 1)) == (0, 0)
    assert new - old <= 1  # a release supports the one before it
    assert (version_names(3, 3), version_names(3, 4)) == ("version 3", "versions 3 to 4")
