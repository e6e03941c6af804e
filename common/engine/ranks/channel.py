"""Messages between rank 0 and another rank, over a pair of sockets of one host or a connection between two.

The kernel closes a pair when either process dies. A connection is closed as well, or cut within `connection.LOST_S` of
the other host's silence.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import sys
import time
from collections.abc import Sequence

from common.errors import RankLost

RANK_END_S = 5.0
"""How long the process of a rank may take to end once its channels are closed, before it is killed."""
LENGTH_BYTES = 8
MOST_BYTES = 2**30
DRAIN_BYTES = 4096
_CUT = select.POLLRDHUP if sys.platform == "linux" else 0
"""The kernel reports that a pair was closed in any case, and that a connection was only where this is asked for."""


class Channel:
    """One end. Every call has a deadline, and raises RankLost at its end or when the other process is gone."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        """`peer`: the other process, in words."""
        self._end, self.peer = end, peer

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @property
    def descriptor(self) -> int:
        """The socket's, for a process that is started with it. Still owned by this end."""
        return self._end.fileno()

    @property
    def here(self) -> str:
        """This host's address on a connection."""
        return str(self._end.getsockname()[0])

    def send(self, message: bytes | memoryview, timeout_s: float) -> None:
        self._end.settimeout(timeout_s)
        try:
            self._end.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        except OSError as error:
            raise RankLost(f"{self.peer} takes no messages: {error}") from error

    def receive(self, timeout_s: float | None, most_bytes: int = MOST_BYTES) -> bytes:
        """The next message. None waits as long as the other process lives."""
        until = _until(timeout_s)
        head = bytearray(LENGTH_BYTES)
        self._fill(memoryview(head), until)
        size = int.from_bytes(head, "little")
        if size > most_bytes:
            raise RankLost(f"{self.peer} sent {size} bytes, at most {most_bytes} are taken")
        body = bytearray(size)
        self._fill(memoryview(body), until)
        return bytes(body)

    def send_parts(self, parts: Sequence[memoryview], timeout_s: float) -> None:
        """Bytes without a head: the other process knows how many come."""
        until = time.monotonic() + timeout_s
        try:
            for part in parts:
                self._end.settimeout(max(0.001, until - time.monotonic()))
                self._end.sendall(part)
        except OSError as error:
            raise RankLost(f"{self.peer} takes no bytes: {error}") from error

    def receive_parts(self, parts: Sequence[memoryview], timeout_s: float | None) -> None:
        """Fills `parts` with what `send_parts` sends."""
        until = _until(timeout_s)
        for part in parts:
            self._fill(part, until)

    def send_descriptor(self, descriptor: int, timeout_s: float) -> None:
        """Gives the other process an open file."""
        self._end.settimeout(timeout_s)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            self._end.sendmsg([b"\0"], [rights])
        except OSError as error:
            raise RankLost(f"{self.peer} takes no file: {error}") from error

    def receive_descriptor(self, timeout_s: float) -> int:
        """The open file that the other process gives. The caller closes it."""
        self._end.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except OSError as error:
            raise RankLost(f"{self.peer} gave no file: {error}") from error
        if not descriptors:
            raise RankLost(f"{self.peer} gave no file, or is gone")
        return descriptors[0]

    def is_cut(self, wait_s: float | None = 0.0) -> bool:
        """Whether the other process is gone; waits for that for so long, None without end. For any thread."""
        return self._has(_CUT, wait_s)

    def has_message(self) -> bool:
        """Whether something has arrived that was not read, or the other process is gone. For any thread."""
        return self._has(select.POLLIN, 0.0)

    def try_send(self, body: bytes) -> None:
        """A few bytes without a head; none where the other process is gone, or leaves earlier ones. For any thread."""
        with contextlib.suppress(OSError):
            if self._has(select.POLLOUT, 0.0):
                self._end.send(body, socket.MSG_DONTWAIT)

    def drain(self) -> bool:
        """Takes what has come of `try_send`, and says whether anything has. One thread at a time, beside others that
        send."""
        found = False
        with contextlib.suppress(OSError, ValueError):  # it is cut, or closed meanwhile
            while self._has(select.POLLIN, 0.0) and self._end.recv(DRAIN_BYTES, socket.MSG_DONTWAIT):
                found = True
        return found

    def cut(self) -> None:
        """Both processes see the other as gone from now on. For any thread."""
        with contextlib.suppress(OSError):  # it is cut
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
                raise RankLost(f"{self.peer} sends nothing: {error}") from error
            if not count:
                raise RankLost(f"{self.peer} is gone")
            filled += count


def _until(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
