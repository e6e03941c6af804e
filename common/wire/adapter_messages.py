"""Messages about LoRA adapters: their state on workers, and orders of routers.

Workers own what is loaded and report it in every heartbeat. The higher version of a name wins. A router that learns of
a newer version sends it to workers with an older one or none.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.wire.message_fields import Count, Message, Name, Text

MAX_ADAPTERS = 256
"""Maximum number of names in a report, including unloaded and failed ones."""
MAX_PATH = 1024
"""Maximum length in characters."""
FLAG_VERSION = 1
"""Version of adapters loaded by a flag. All orders of routers are newer."""
AdapterPath = Annotated[str, Meta(max_length=MAX_PATH)]
Digest = Annotated[str, Meta(pattern=r"^(|[0-9a-f]{32})\Z")]
"""Hash of an adapter's weights, ranks and scales in hexadecimal; "" for none."""
AdapterStatus = Literal["loading", "loaded", "failed", "unloaded"]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """State of one name on a worker.

    `message` explains a failure. Loaded adapters have `num_bytes` and a maximum `rank`.
    """

    name: Name
    version: Count
    status: AdapterStatus
    path: AdapterPath = ""
    digest: Digest = ""
    message: Text = ""
    rank: Count = 0
    num_bytes: Count = 0


class SetAdapter(Message, frozen=True, tag=10):
    """Order to load the adapter in the worker's folder `path` under this name, or with "" to unload it.

    Requests that use the previous adapter of the name continue with it. Versions older than the worker's are ignored.
    The result is reported in heartbeats.
    """

    name: Name
    version: Count
    path: AdapterPath
