"""A process of a router that was started again takes connections once it knows the workers that the others know.

Else a client would see by the process that the kernel gave it to that a model has no worker, though it has.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING

import orjson

from router.api import ABLE
from router.generation import Service

if TYPE_CHECKING:  # only routers of several processes need its HTTP client
    from router.siblings import Siblings

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Several heartbeats. A worker that answers the others and not this process must not keep it away for good."""
POLL_S = 0.02
"""Between two looks at what has no event: whether each model has workers, whether the last answer has ended."""


async def catch_up(service: Service, siblings: Siblings, stop: asyncio.Event) -> None:
    """Wait until `stop`, or until each model for which another process has workers has some here too."""
    began, told = time.monotonic(), (await siblings.ask_all(ABLE)).values()
    awaited = set(itertools.chain.from_iterable(orjson.loads(body) for body in told))
    while missing := awaited.difference(service.models.available):
        if stop.is_set():
            return
        if time.monotonic() - began > PATIENCE_S:
            known = {"models": ", ".join(sorted(missing)), "waited_s": PATIENCE_S}
            log.warning("other processes have workers of models that this one has none of yet", extra=known)
            return
        await asyncio.sleep(POLL_S)
