"""A process of the previous protocol version. Arguments: MODULE, flags of the module.

It sends no field that was added since, ignores such fields in what it receives, and speaks no other version.
"""

from __future__ import annotations

import runpy
import sys

from common.wire import codec, message_fields, messages

VERSION = message_fields.OLDEST_PROTOCOL_VERSION


def main(module: str, *flags: str) -> None:
    encode, decode = codec.encode, codec.decode
    codec.encode = lambda message, version=VERSION: encode(message, min(version, VERSION))
    codec.decode = lambda data: decode(encode(decode(data), VERSION))  # type: ignore[arg-type]
    for place in (message_fields, messages):
        place.PROTOCOL_VERSION = VERSION  # type: ignore[misc]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
