"""The memories of prefill workers on this host, from their first offer until their death."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container

import zmq

from diptych.common.messages import KVOpen
from diptych.common.shared_memory import NotShared, PeerMemory

log = logging.getLogger(__name__)
MAX_WORKERS = 256
"""More than any host runs: what hostile offers can make this worker remember."""

_Key = tuple[str, int, bytes]  # worker, boot epoch, nonce of its offer


class PeerMemories:
    """Used by the receiver's thread only. A refused offer is remembered too: it is tried, and logged, once."""

    def __init__(self, share: bool) -> None:
        self._share = share
        self._known: OrderedDict[_Key, PeerMemory | None] = OrderedDict()
        self._poller: zmq.Poller | None = None

    def watch(self, poller: zmq.Poller) -> None:
        """Let `poller` wake its thread when the owner of a memory dies."""
        self._poller = poller

    def of(self, opened: KVOpen) -> PeerMemory | None:
        """The memory that a prefill worker offers, if this process can read it."""
        key = (opened.worker_id, opened.epoch, opened.memory.nonce if opened.memory else b"")
        if key not in self._known:
            self._known[key] = self._open(opened)
            if len(self._known) > MAX_WORKERS:
                _, oldest = self._known.popitem(last=False)
                self._release(oldest)
        self._known.move_to_end(key)
        return self._known[key]

    def drop_dead(self, ready: Container[object]) -> None:
        """Unmap the memories whose owner's descriptor is in `ready`: a dead worker's pages go with their last map."""
        for key, memory in list(self._known.items()):
            if memory is not None and memory.process in ready:
                log.info("%s is gone: its memory is unmapped", key[0])
                del self._known[key]
                self._release(memory)

    def close(self) -> None:
        for memory in self._known.values():
            self._release(memory)
        self._known.clear()

    def _open(self, opened: KVOpen) -> PeerMemory | None:
        worker = opened.worker_id
        if opened.memory is None or not self._share:
            log.info(
                "KV from %s comes over TCP: shared memory is not %s",
                worker,
                "used here" if opened.memory else "offered",
            )
            return None
        try:
            memory = PeerMemory(opened.memory)
        except NotShared as error:
            log.info("KV from %s comes over TCP: %s", worker, error)
            return None
        log.info("KV from %s comes through shared memory", worker)
        if self._poller is not None:
            self._poller.register(memory.process, zmq.POLLIN)
        return memory

    def _release(self, memory: PeerMemory | None) -> None:
        if memory is None:
            return
        if self._poller is not None:
            self._poller.unregister(memory.process)
        memory.close()
