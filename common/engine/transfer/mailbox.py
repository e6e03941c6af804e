"""Queue from one thread to a thread that polls sockets."""

from __future__ import annotations

import logging
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import zmq

from common.engine.transfer.frames import events

log = logging.getLogger(__name__)
Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """`put` and `close_sending` are for the sending thread, the other members for the polling thread.

    The queue is unbounded; the sending thread must limit the number of items.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        address = f"inproc://mailbox-{id(self)}"
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(address)
        self._wake = context.socket(zmq.PUSH)
        self._wake.set(zmq.LINGER, 0)
        self._wake.connect(address)

    def put(self, item: Item) -> None:
        self._items.put(item)
        try:
            self._wake.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            # The pipe is full of unread wake-ups, so the other thread will find this item too.
            log.debug("wake-up coalesced")

    @property
    def is_waiting(self) -> bool:
        """Whether an item was put since the last `take`."""
        return bool(events(self.socket) & zmq.POLLIN)

    def take(self) -> list[Item]:
        """Return all items, in order."""
        while self.is_waiting:
            self.socket.recv()
        items: list[Item] = []
        while True:
            try:
                items.append(self._items.get_nowait())
            except Empty:
                return items

    def close_sending(self) -> None:
        self._wake.close()

    def close(self) -> None:
        self.socket.close()
