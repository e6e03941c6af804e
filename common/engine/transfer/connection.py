"""Sockets from a KV sender to a decode worker, or from a puller to a lender."""

from __future__ import annotations

import time

import zmq

from common.engine.transfer.frames import MAX_REPLY_BYTES, dealer, events
from common.wire import WATCHED, Curve, Dialer


class KVConnection:
    """Connection of several sockets, owned by one thread.

    The first of `streams` carries all messages. Blocks are distributed round-robin over all streams.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        address: str,
        num_streams: int,
        curve: Curve | None = None,
        most_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """`most_bytes`: maximum size of incoming frames.

        Raises zmq.ZMQError for an invalid address or if too many sockets are open. No socket remains open then.
        """
        self.streams: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._dialers: list[Dialer] = []
        self._poller = poller
        self.used_at = time.monotonic()
        self.num_transfers = 0
        self.was_cut = False
        """Whether ZeroMQ ever reported a disconnection, also during a handshake."""
        self.way = ""  # how blocks are sent, as last logged
        try:
            for _ in range(num_streams):
                self._open(context, address, curve, most_bytes)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def refusal(self) -> str:
        """Reason why the peer rejects this connection, or ""."""
        return next((dialer.refusal for dialer in self._dialers if dialer.refusal), "")

    def dial_again(self, now: float) -> bool:
        """Process connection events and redial streams that failed or timed out.

        Returns True if an established stream was cut or the first is redialled: messages sent so far may be lost, and
        the peer must learn the first stream's new routing id. ZeroMQ reconnects a cut stream without notice.
        """
        first, must_announce, must_renew = self._dialers[0], False, False
        for monitor, dialer in zip(self._monitors, self._dialers, strict=True):
            while events(monitor) & zmq.POLLIN:
                was_up = dialer.is_up
                self.was_cut |= dialer.on_event(monitor.recv_multipart(), now) == zmq.EVENT_DISCONNECTED
                if was_up and not dialer.is_up:
                    must_announce = True
                    must_renew |= dialer is not first
            if dialer.dial_at <= now:
                dialer.dial()
                must_announce |= dialer is first
        if must_renew:  # a peer knows by its routing id alone that blocks of another stream may be lost
            first.dial()
        return must_announce

    @property
    def dial_at(self) -> float:
        """Time at which `dial_again` must be called even without an event."""
        return min(dialer.dial_at for dialer in self._dialers)

    def close(self) -> None:
        for socket in (*self.streams, *self._monitors):
            if socket in self._poller:
                self._poller.unregister(socket)
        for stream in self.streams:
            stream.disable_monitor()
            stream.close()
        for monitor in self._monitors:
            monitor.close()

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve | None, most_bytes: int
    ) -> None:
        stream = dealer(context, most_bytes)
        stream.set(zmq.IPV6, 1 if "[" in address else 0)
        # Assign I/O threads explicitly: simultaneous connections would all get the currently least loaded one.
        stream.set(zmq.AFFINITY, 1 << len(self.streams) % context.get(zmq.IO_THREADS))
        if self.streams:
            stream.set(zmq.IMMEDIATE, 1)  # do not queue blocks before the handshake, which may fail
        self.streams.append(stream)
        monitor = stream.get_monitor_socket(WATCHED)
        monitor.set(zmq.LINGER, 0)
        self._monitors.append(monitor)
        self._dialers.append(Dialer(stream, address, curve))
        for socket in (stream, monitor):
            self._poller.register(socket, zmq.POLLIN)
