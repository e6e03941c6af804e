"""Adapters of a tensor parallel worker. Each rank reads the file and loads its shard into the same slot.

Orders use a separate channel, so that loading, which takes seconds, does not delay steps.

    rank 0         read ─ AdapterOrder ─>   fill its own slot   <─ RankReport ─   the adapter may be used
    rank r         read, compare digests, fill the slot
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from common.engine.adapters import AdaptedModel, AdapterSlots, AdapterWeights, shard_of
from common.engine.ranks.channel import Channel
from common.engine.ranks.processes import SEND_S, RankReport
from common.errors import DiptychError, ModelError
from common.machine import READ_S
from common.model_files import ModelConfig
from common.model_files.architecture import Shard

log = logging.getLogger(__name__)
LOAD_S = 2 * READ_S + 60.0
"""Maximum time, in seconds, for another rank to load an adapter that rank 0 has read: two files and the copies."""


class AdapterOrder(msgspec.Struct, frozen=True):
    """Order to load the adapter at `path`, which must have this digest, into a slot."""

    path: str
    place: int
    digest: str


class RankPlaces(AdapterSlots):
    """Adapter slots of one rank's model. Adapters are validated against the whole model."""

    def __init__(self, model: AdaptedModel, whole: ModelConfig, shard: Shard, *, max_loras: int, max_rank: int) -> None:
        super().__init__(model, max_loras=max_loras, max_rank=max_rank, config=whole)
        self._shard = shard

    def read(self, path: str) -> AdapterWeights:
        return shard_of(super().read(path), self._config, self._shard)


class AllPlaces(RankPlaces):
    """Adapter slots of rank 0, which also fills those of the other ranks through `channels`."""

    def __init__(
        self,
        model: AdaptedModel,
        whole: ModelConfig,
        channels: Sequence[Channel],
        *,
        max_loras: int,
        max_rank: int,
    ) -> None:
        super().__init__(model, whole, Shard(0, len(channels) + 1), max_loras=max_loras, max_rank=max_rank)
        self._channels = channels

    def fill(self, place: int, adapter: AdapterWeights, path: str) -> int:
        """Load an adapter on all ranks. Raises ModelError if another rank cannot read the same file."""
        order = msgspec.json.encode(AdapterOrder(path, place, adapter.digest))
        for channel in self._channels:
            channel.send(order, SEND_S)
        num_bytes = super().fill(place, adapter, path)
        until, problems = time.monotonic() + LOAD_S, []
        for rank, channel in enumerate(self._channels, 1):  # all, so that no report is taken for the next order's
            report = msgspec.json.decode(channel.receive(max(0.001, until - time.monotonic())), type=RankReport)
            if report.problem:
                problems.append(f"rank {rank}: {report.problem}")
        if problems:
            raise ModelError("; ".join(problems))
        return num_bytes


def execute_adapter_orders(channel: Channel, places: RankPlaces) -> None:
    """Execute adapter orders on another rank, on a separate thread. Raises RankLost when rank 0 is gone."""
    while True:
        order = msgspec.json.decode(channel.receive(None), type=AdapterOrder)
        channel.send(msgspec.json.encode(RankReport(_problem(order, places))), SEND_S)


def _problem(order: AdapterOrder, places: RankPlaces) -> str:
    """Execute an order. Return the problem, or ""."""
    try:
        adapter = places.read(order.path)
        if adapter.digest != order.digest:
            return f"{order.path} differs from the file that rank 0 has read: load the adapter again"
        places.fill(order.place, adapter, order.path)
    except DiptychError as error:
        return str(error)
    except Exception as error:  # such as out of memory; the next adapter overwrites the whole slot
        log.exception("adapter %s failed to load", order.path)
        return f"{type(error).__name__}: {error}"
    return ""
