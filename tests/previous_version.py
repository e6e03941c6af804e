"""A process of the previous protocol version. Arguments: MODULE, flags of the module.

It sends no field that was added since, ignores such fields in what it receives, and speaks no other version.
"""

from __future__ import annotations

import runpy
import sys
from functools import cache
from typing import Any, get_args

import msgpack
import msgspec
from msgspec.structs import astuple, fields

from common.wire import codec, message_fields, messages

VERSION = message_fields.OLDEST_PROTOCOL_VERSION


@cache
def num_fields(struct: Any) -> int:
    """Return the number of fields that a type of structs had in this version. Later fields stand after them."""
    return sum(_added_in(field.type) <= VERSION for field in fields(struct))


def _added_in(annotation: Any) -> int:
    marks = [meta.extra["since"] for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta) and meta.extra]
    return max(marks, default=0)


def encode(message: messages.Message) -> bytes:
    """Encode a message as a process of this version does."""

    def known(struct: Any) -> tuple[Any, ...]:
        return astuple(struct)[: num_fields(type(struct))]

    packed = msgpack.packb((message.__struct_config__.tag, *known(message)), default=known)
    return codec.seal(packed or b"")


def main(module: str, *flags: str) -> None:
    decode = codec.decode
    codec.encode = encode
    codec.decode = lambda data: decode(encode(decode(data)))
    for place in (message_fields, messages):
        place.PROTOCOL_VERSION = VERSION  # type: ignore[misc]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
