"""Messages about how a worker serves: running, paused or asleep, and with which weights.

Workers own their state and report it in every heartbeat. The highest version wins: a router that learns of a newer
order sends it to workers with an older one, so that workers that join or restart catch up.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.wire.message_fields import Count, Message, Seconds, Text

MAX_WEIGHTS_PATH = 1024
"""Maximum length in characters."""
MAX_WEIGHT_VERSION = 256
"""Maximum length in characters."""
WEIGHTS_PART_BYTES = 1024 * 1024
"""Size of a `WeightsPart`. A router needs less than 1 ms for one, during which it forwards no tokens."""
SHA256 = r"^[0-9a-f]{64}\Z"
WeightsPath = Annotated[str, Meta(max_length=MAX_WEIGHTS_PATH)]
WeightVersion = Annotated[str, Meta(max_length=MAX_WEIGHT_VERSION)]
ServingMode = Literal["run", "pause", "hold", "sleep"]
"""- `run`: serve.
- `pause`: refuse new requests and complete the running ones.
- `hold`: refuse new requests and compute nothing, so that running requests continue later.
- `sleep`: like `pause`, and then free the memory of the model.
"""
ServingStatus = Literal["busy", "done", "failed"]


class SetServing(Message, frozen=True, tag=11):
    """Order to serve in this mode and with these weights. Versions older than the worker's are ignored.

    - `weights`: folder or file of the weights, or text of `common.model_files.ReceivedWeights`; "" for those with which
      the worker was started. `weights_number` identifies them: the version of the order that introduced them, 0 for the
      worker's own. Workers with different numbers never exchange KV, even if the files are equal.
    - `staged`: weights to load in addition, for a later order that has them as `weights`; "" drops loaded ones.
    - `aborts`: routers end their running requests.
    - After `lease_s` seconds without a newer order the worker runs again with its weights; 0: never. This bounds an
      update whose router has died.
    """

    version: Count
    mode: ServingMode = "run"
    weights: WeightsPath = ""
    weights_number: Count = 0
    weight_version: WeightVersion = ""
    staged: WeightsPath = ""
    staged_number: Count = 0
    aborts: bool = False
    lease_s: Seconds = 0.0


class WeightsRequest(Message, frozen=True, tag=28):
    """A worker requests the part from `offset` of a weights file that a router received from a client.

    A router without the file ignores the request.
    """

    sha256: Annotated[str, Meta(pattern=SHA256)]
    offset: Count


class WeightsPart(Message, frozen=True, tag=12):
    """Part of a weights file, of `WEIGHTS_PART_BYTES` unless it is the last one."""

    sha256: Annotated[str, Meta(pattern=SHA256)]
    offset: Count
    data: Annotated[bytes, Meta(min_length=1, max_length=WEIGHTS_PART_BYTES)]


class ServingState(msgspec.Struct, frozen=True, array_like=True):
    """The last order of a worker, and how far the worker has executed it. `message` explains a failure.

    `weights`, `weights_number` and `weight_version` are those of the order. The worker computes with the weights
    `active_number`.
    """

    version: Count
    mode: ServingMode
    status: ServingStatus
    weights: WeightsPath = ""
    weights_number: Count = 0
    weight_version: WeightVersion = ""
    active_number: Count = 0
    aborts: bool = False
    message: Text = ""
