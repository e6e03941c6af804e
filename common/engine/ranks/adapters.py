"""Adapters of a worker of several ranks: each rank reads the file itself, and puts its part into the same place.

Orders have a channel of their own, so that a load, which takes seconds, holds up no step.

rank 0         read ─ AdapterOrder ─>   fill its own place   <─ RankReport ─   the adapter may be used
rank r         read, compare digests, fill the place
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from common.engine.adapters import AdaptedModel, AdapterPlaces, AdapterWeights, shard_of
from common.engine.ranks.channel import Channel
from common.engine.ranks.processes import SEND_S, RankReport
from common.errors import DiptychError, ModelError
from common.machine import READ_S
from common.model_files import ModelConfig
from common.model_files.architecture import Shard

log = logging.getLogger(__name__)
LOAD_S = 2 * READ_S + 60.0
"""Maximum time, in seconds, for another rank to load an adapter that this rank has read: two files and the copies."""


class AdapterOrder(msgspec.Struct, frozen=True):
    """Have the adapter at `path`, which must have this digest, in a place."""

    path: str
    place: int
    digest: str


class RankPlaces(AdapterPlaces):
    """The places of one rank's model; adapters are checked against the whole one."""

    def __init__(self, model: AdaptedModel, whole: ModelConfig, shard: Shard, *, max_loras: int, max_rank: int) -> None:
        super().__init__(model, max_loras=max_loras, max_rank=max_rank, config=whole)
        self._shard = shard

    def read(self, path: str) -> AdapterWeights:
        return shard_of(super().read(path), self._config, self._shard)


class AllPlaces(RankPlaces):
    """Rank 0's places, and through `channels` those of the other ranks."""

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
        """Raises ModelError where another rank cannot read the same."""
        order = msgspec.json.encode(AdapterOrder(path, place, adapter.digest))
        for channel in self._channels:
            channel.send(order, SEND_S)
        num_bytes = super().fill(place, adapter, path)
        until, problems = time.monotonic() + LOAD_S, []
        for rank, channel in enumerate(self._channels, 1):  # all of them: an answer left unread would be the next one's
            report = msgspec.json.decode(channel.receive(max(0.001, until - time.monotonic())), type=RankReport)
            if report.problem:
                problems.append(f"rank {rank}: {report.problem}")
        if problems:
            raise ModelError("; ".join(problems))
        return num_bytes


def take_adapters(channel: Channel, places: RankPlaces) -> None:
    """Another rank's side, on a thread of its own. Raises RankLost when rank 0 is gone."""
    while True:
        order = msgspec.json.decode(channel.receive(None), type=AdapterOrder)
        channel.send(msgspec.json.encode(RankReport(_problem(order, places))), SEND_S)


def _problem(order: AdapterOrder, places: RankPlaces) -> str:
    """Carries out an order; what was wrong, or ""."""
    try:
        adapter = places.read(order.path)
        if adapter.digest != order.digest:
            return f"{order.path} is another file now than rank 0 has read: load it again"
        places.fill(order.place, adapter, order.path)
    except DiptychError as error:
        return str(error)
    except Exception as error:  # such as for lack of memory: the next adapter overwrites all of the place
        log.exception("cannot load the adapter at %s", order.path)
        return f"{type(error).__name__}: {error}"
    return ""
