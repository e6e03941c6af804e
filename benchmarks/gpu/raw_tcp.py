"""The rate of plain TCP over loopback: `sendall` and `recv_into` in two processes."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection

RECEIVE_BYTES = 1024 * 1024
DONE = b"k"


def serve(pipe: Connection, num_bytes: int) -> None:
    """Body of the receiving process: sends its port, then reads `num_bytes` a connection and answers one byte."""
    buffer = bytearray(RECEIVE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection:
                left = num_bytes
                while left:
                    count = connection.recv_into(buffer)
                    if not count:
                        break
                    left -= count
                connection.sendall(DONE)


def send(port: int, data: memoryview, num_bytes: int, write_bytes: int) -> float:
    """Seconds until the other side has all of `num_bytes`, taken from `data` over and over."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.perf_counter()
        sent = 0
        while sent < num_bytes:
            offset = sent % len(data)
            piece = data[offset : offset + min(write_bytes, num_bytes - sent)]
            connection.sendall(piece)
            sent += len(piece)
        if connection.recv(1) != DONE:
            raise ConnectionError("the receiver hung up")
        return time.perf_counter() - begin
