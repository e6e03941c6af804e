"""A queue from one thread to another that polls sockets."""

from __future__ import annotations

import logging
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import zmq

from common.engine.transfer.frames import events

log = logging.getLogger(__name__)
Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """`put` and `close_sending` are for one thread; `socket`, `take`, `is_waiting` and `close` for the one that polls.

    It has no bound of its own: the putting thread bounds how many items it puts.
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
            # The pipe is full of wake-ups that the other thread has not read yet: it will find this item too.
            log.debug("wake-up coalesced")

    @property
    def is_waiting(self) -> bool:
        """Whether an item was put since the last `take`."""
        return bool(events(self.socket) & zmq.POLLIN)

    def take(self) -> list[Item]:
        """All items, in order."""
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
