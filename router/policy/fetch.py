"""What a worker takes of a prompt from its disk, or from a peer's cache, instead of computing it."""

from __future__ import annotations

import msgspec

from common.wire.messages import KVPeer


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """The worker has the prompt's first `end` tokens after `seconds`.

    `peer` lends them, at the control address `lender`, which is busy with that for `lending_s`; None: they come from
    the worker's own disk.
    """

    end: int
    seconds: float
    peer: KVPeer | None = None
    lender: str = ""
    lending_s: float = 0.0
