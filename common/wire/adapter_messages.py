"""LoRA adapters between routers and workers: what each worker holds, and what routers want it to hold.

Workers own what is loaded, and every heartbeat says so. Of two versions of a name the larger one counts everywhere:
a router that hears of a newer version tells the workers that have an older one, or none.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.wire.message_fields import Count, Message, Name, Text

MAX_ADAPTERS = 256
"""Names that a worker tells of, those included that were unloaded or could not be loaded."""
MAX_PATH = 1024
"""Characters."""
FLAG_VERSION = 1
"""Of what a flag loaded: every order of a router is newer."""
AdapterPath = Annotated[str, Meta(max_length=MAX_PATH)]
Digest = Annotated[str, Meta(pattern=r"^(|[0-9a-f]{32})\Z")]
"""Of an adapter's weights, ranks and scales, in hexadecimal; "" for none."""
AdapterStatus = Literal["loading", "loaded", "failed", "unloaded"]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """One name on a worker. `message`: why it could not be loaded. A loaded one takes `num_bytes`, at most `rank`."""

    name: Name
    version: Count
    status: AdapterStatus
    path: AdapterPath = ""
    digest: Digest = ""
    message: Text = ""
    rank: Count = 0
    num_bytes: Count = 0


class SetAdapter(Message, frozen=True, tag=10):
    """Load the adapter in the worker's folder `path` under this name, or with "" unload it.

    Requests that use what the name stood for before go on to their end. An older version than the worker's does
    nothing. The outcome is in the worker's heartbeats.
    """

    name: Name
    version: Count
    path: AdapterPath
