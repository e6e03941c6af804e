"""Messages between rank 0 and another rank over a pair of sockets, which the kernel closes when either process dies."""

from __future__ import annotations

import array
import select
import socket
import time

from common.errors import RankLost

LENGTH_BYTES = 8
MOST_BYTES = 2**30


class Channel:
    """One end. Every call has a deadline, and raises RankLost at its end or when the other process is gone."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        """`peer`: the other process, in words."""
        self._end, self._peer = end, peer

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def send(self, message: bytes | memoryview, timeout_s: float) -> None:
        self._end.settimeout(timeout_s)
        try:
            self._end.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        except OSError as error:
            raise RankLost(f"{self._peer} takes no messages: {error}") from error

    def receive(self, timeout_s: float | None) -> bytes:
        """The next message. None waits as long as the other process lives."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        size = int.from_bytes(self._read(LENGTH_BYTES, until), "little")
        if size > MOST_BYTES:
            raise RankLost(f"{self._peer} sent {size} bytes, at most {MOST_BYTES} are taken")
        return bytes(self._read(size, until))

    def send_descriptor(self, descriptor: int, timeout_s: float) -> None:
        """Gives the other process an open file."""
        self._end.settimeout(timeout_s)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            self._end.sendmsg([b"\0"], [rights])
        except OSError as error:
            raise RankLost(f"{self._peer} takes no file: {error}") from error

    def receive_descriptor(self, timeout_s: float) -> int:
        """The open file that the other process gives. The caller closes it."""
        self._end.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except OSError as error:
            raise RankLost(f"{self._peer} gave no file: {error}") from error
        if not descriptors:
            raise RankLost(f"{self._peer} gave no file, or is gone")
        return descriptors[0]

    def is_cut(self, wait_s: float | None = 0.0) -> bool:
        """Whether the other process is gone; waits for that for so long, None without end. For any thread."""
        hang_up = select.poll()
        hang_up.register(self._end, 0)  # only what is reported unasked: that the other end is closed
        return bool(hang_up.poll(None if wait_s is None else wait_s * 1000))

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int, until: float | None) -> bytearray:
        found = bytearray(size)
        view, filled = memoryview(found), 0
        while filled < size:
            self._end.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            try:
                count = self._end.recv_into(view[filled:])
            except OSError as error:
                raise RankLost(f"{self._peer} sends nothing: {error}") from error
            if not count:
                raise RankLost(f"{self._peer} is gone")
            filled += count
        return found
