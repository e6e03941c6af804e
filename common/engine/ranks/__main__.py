"""Entry point of ranks 1, 2, ... of a worker: `python -m common.engine.ranks FD FD`.

The descriptors are channels to rank 0, for steps and for adapters.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import msgspec

from common.engine.ranks.channel import Channel
from common.engine.ranks.processes import SEND_S, START_S, RankPlan, RankReport
from common.errors import DiptychError
from common.observe import setup_logging

log = logging.getLogger("common.engine.ranks")


def watch(channel: Channel) -> None:
    """Exit at once when rank 0 is gone. The process owns nothing that outlives it."""
    channel.is_cut(None)
    os._exit(0)


def main(descriptors: Sequence[int]) -> int:
    """Run the steps of rank 0. Exits with status 0 when rank 0 is gone, and returns 1 after an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 gets them as well, drains and then stops this process
    channel, orders = (Channel(socket.socket(fileno=each), "rank 0") for each in descriptors)
    threading.Thread(target=watch, args=(channel,), name="rank-0-watch", daemon=True).start()
    plan = msgspec.json.decode(channel.receive(START_S), type=RankPlan, dec_hook=lambda kind, value: kind(value))
    setup_logging(plan.name, plan.log_level, json=plan.log_json)
    # Imported here: loading torch takes a second or more, and rank 0 may be gone by then.
    from common.engine.ranks.follower import follow

    try:
        channel.send(msgspec.json.encode(RankReport()), SEND_S)
        follow(plan, channel, orders)
    except DiptychError as error:
        if channel.is_cut():
            return 0
        log.error("rank %d exits: %s", plan.rank, error)
    except Exception:
        log.exception("rank %d exits after an unexpected error", plan.rank)
    return 1


if __name__ == "__main__":
    status = main(list(map(int, sys.argv[1:])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
