"""Message channel between two processes: a socket pair on one host, or a connection between hosts.

The kernel closes it when either process dies.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import sys
import time

from common.errors import RankLost

RANK_END_S = 5.0
"""Maximum time, in seconds, for a rank process to exit after its channels are closed, before it is killed."""
LENGTH_BYTES = 8
MAX_BYTES = 2**30
DRAIN_BYTES = 4096
_CUT = select.POLLRDHUP if sys.platform == "linux" else 0
"""poll() always reports a closed socket pair, but a closed connection only with this flag."""


class Channel:
    """One end of a channel. Calls raise RankLost at their deadline or when the other process is gone."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        """`peer` describes the other process in errors."""
        self._end, self.peer = end, peer

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @property
    def descriptor(self) -> int:
        """File descriptor of the socket, for a child process. This end still owns it."""
        return self._end.fileno()

    @property
    def here(self) -> str:
        """Local address of a connection."""
        return str(self._end.getsockname()[0])

    def send(self, message: bytes | memoryview, timeout_s: float) -> None:
        self._end.settimeout(timeout_s)
        try:
            self._end.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        except OSError as error:
            raise RankLost(f"cannot send to {self.peer}: {error}") from error

    def receive(self, timeout_s: float | None, most_bytes: int = MAX_BYTES) -> bytes:
        """Return the next message. With None, waits until one arrives or the other process is gone."""
        until = _until(timeout_s)
        head = bytearray(LENGTH_BYTES)
        self._fill(memoryview(head), until)
        size = int.from_bytes(head, "little")
        if size > most_bytes:
            raise RankLost(f"{self.peer} sent a message of {size} bytes, the limit is {most_bytes}")
        body = bytearray(size)
        self._fill(memoryview(body), until)
        return bytes(body)

    def send_descriptor(self, descriptor: int, timeout_s: float) -> None:
        """Pass an open file to the other process."""
        self._end.settimeout(timeout_s)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            self._end.sendmsg([b"\0"], [rights])
        except OSError as error:
            raise RankLost(f"cannot pass a file to {self.peer}: {error}") from error

    def receive_descriptor(self, timeout_s: float) -> int:
        """Return the open file that the other process passes. The caller closes it."""
        self._end.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except OSError as error:
            raise RankLost(f"cannot receive a file from {self.peer}: {error}") from error
        if not descriptors:
            raise RankLost(f"{self.peer} passed no file or is gone")
        return descriptors[0]

    def is_cut(self, wait_s: float | None = 0.0) -> bool:
        """Whether the other process is gone. Waits up to `wait_s` for that, or forever if None. Thread-safe."""
        return self._has(_CUT, wait_s)

    def has_message(self) -> bool:
        """Whether unread data have arrived, or the other process is gone. Thread-safe."""
        return self._has(select.POLLIN, 0.0)

    def try_send(self, body: bytes) -> None:
        """Send a few bytes without a length prefix. Drops them if the peer is gone or slow. Thread-safe."""
        with contextlib.suppress(OSError):
            if self._has(select.POLLOUT, 0.0):
                self._end.send(body, socket.MSG_DONTWAIT)

    def drain(self) -> bool:
        """Read everything sent with `try_send`, and return whether there was anything.

        Only one thread may call this. Other threads may send at the same time.
        """
        found = False
        with contextlib.suppress(OSError, ValueError):  # cut, or closed by another thread
            while self._has(select.POLLIN, 0.0) and self._end.recv(DRAIN_BYTES, socket.MSG_DONTWAIT):
                found = True
        return found

    def cut(self) -> None:
        """Disconnect: both processes see the other as gone. Thread-safe."""
        with contextlib.suppress(OSError):  # already cut
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def _has(self, event: int, wait_s: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._end, event)
        return bool(waiting.poll(None if wait_s is None else wait_s * 1000))

    def _fill(self, view: memoryview, until: float | None) -> None:
        filled = 0
        while filled < len(view):
            self._end.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            try:
                count = self._end.recv_into(view[filled:])
            except OSError as error:
                raise RankLost(f"cannot receive from {self.peer}: {error}") from error
            if not count:
                raise RankLost(f"{self.peer} is gone")
            filled += count


def _until(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
