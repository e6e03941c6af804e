"""Which thread bounds KV between two hosts: processor seconds per GB, plain, with CURVE and with TLS.

Two processes move blocks of 1 MiB over loopback: through KVSender and KVReceiver, over one or several sockets, with one
or several of ZeroMQ's I/O threads, plain and with CURVE; and through Python's TLS 1.3 with AES-256-GCM. A thread
that needs s processor seconds for a GB moves 1/s GB/s at most on a core of its own, which a rate over loopback does not
tell where processes share cores. Seconds are medians of rounds in turns.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.block_path import BlockPath, Receivers, Shape, serve_blocks
from benchmarks.load.report import open_console, print_table
from benchmarks.script import in_turns, run, script_parser, write_result
from common.wire.curve_keys import KeyPair

PROGRAM = "python -m benchmarks.kv_threads"
BLOCK_BYTES = 2**20
CASES = ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4))
"""Sockets and I/O threads."""
DONE = b"k"
Usage = dict[str, float]


def usage_of(pid: int | str) -> Usage:
    """Processor seconds of each thread of a process, by its name and number."""
    found = {}
    for task in (Path("/proc") / str(pid) / "task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])  # ticks of 10 ms are too coarse
            found[f"{(task / 'comm').read_text().strip()} {task.name}"] = nanoseconds / 1e9
        except OSError:  # it ended meanwhile
            continue
    return found


@dataclass
class Way:
    """How all bytes go from this process to that of `pid`, with one call of `move`. `rounds`: seconds per GB."""

    name: str
    pid: int
    move: Callable[[], object]
    rounds: list[tuple[float, float]] = field(default_factory=list)

    def measure(self, num_bytes: int) -> None:
        before = usage_of("self"), usage_of(self.pid)
        self.move()
        after = usage_of("self"), usage_of(self.pid)
        sender, receiver = (
            max(seconds - then.get(name, 0.0) for name, seconds in now.items())
            for then, now in zip(before, after, strict=True)
        )
        self.rounds.append((sender / num_bytes * 1e9, receiver / num_bytes * 1e9))

    @property
    def row(self) -> dict[str, Any]:
        sender, receiver = (statistics.median(column) for column in zip(*self.rounds, strict=True))
        return {
            "way": self.name,
            "sender_s_per_gb": round(sender, 3),
            "receiver_s_per_gb": round(receiver, 3),
            "most_gb_per_s": round(1 / max(sender, receiver), 2),
            "rounds": [[round(each, 3) for each in one] for one in self.rounds],
        }


def certificate(folder: Path) -> tuple[str, str]:
    """Files of a key and of its own certificate. Raises OSError or CalledProcessError without openssl."""
    key, own = str(folder / "key.pem"), str(folder / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", own], check=True, capture_output=True)
    return key, own


def serve_tls(pipe: Connection, key: str, own: str) -> None:
    """Body of the receiving process: reads each connection to its end, one after the other, and answers a byte."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)

    buffer = bytearray(BLOCK_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            with context.wrap_socket(listener.accept()[0], server_side=True) as secured:
                left = int.from_bytes(secured.recv(8), "big")
                while left and (count := secured.recv_into(buffer)):
                    left -= count
                secured.sendall(DONE)


class TLSStream:
    """Sends all of `data` over a new connection, from this thread."""

    def __init__(self, port: int, own: str, data: memoryview) -> None:
        self._port, self._data = port, data
        self._context = ssl.create_default_context(cafile=own)
        self._context.check_hostname = False
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def move(self) -> None:
        """Raises ConnectionError if the other side did not get all of it."""
        with (
            socket.create_connection(("127.0.0.1", self._port)) as plain,
            self._context.wrap_socket(plain) as secured,
        ):
            secured.sendall(len(self._data).to_bytes(8, "big"))
            for begin in range(0, len(self._data), BLOCK_BYTES):
                secured.sendall(self._data[begin : begin + BLOCK_BYTES])
            if secured.recv(1) != DONE:
                raise ConnectionError("the receiver hung up")


def measure(num_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """One row a way. A first round warms up and does not count."""
    cache = np.random.default_rng(0).integers(0, 256, (num_bytes // BLOCK_BYTES, BLOCK_BYTES), np.uint8)
    ways, paths = list[Way](), list[BlockPath]()
    with Receivers() as receivers, tempfile.TemporaryDirectory() as folder:
        for pair in (None, KeyPair.generate()):
            for num_streams, io_threads in CASES:
                shape = Shape(BLOCK_BYTES, len(cache), io_threads)
                address = receivers.start(serve_blocks, shape, True, pair)
                view = lambda index: cache[index].data  # noqa: E731
                paths.append(BlockPath(address, shape, view, num_streams=num_streams, pair=pair))
                name = f"{num_streams} sockets, {io_threads} I/O threads{', CURVE' * (pair is not None)}"
                ways.append(Way(name, receivers.last_pid, paths[-1].run))
        key, own = certificate(Path(folder))
        port = receivers.start(serve_tls, key, own)
        stream = TLSStream(port, own, cache.reshape(-1).data)
        ways.append(Way("TLS 1.3, AES-256-GCM", receivers.last_pid, stream.move))
        for repeat in range(repeats + 1):
            for way in in_turns(ways, repeat):
                way.measure(num_bytes)
                if not repeat:
                    way.rounds.clear()
        for path in paths:
            path.close()
    return [way.row for way in ways]


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--mib", type=int, default=256, help="MiB to move each time")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds of all ways")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    rows = measure(options.mib * 2**20, options.repeats)
    columns = ("way", "sender's busiest thread, s/GB", "receiver's", "at most, GB/s")
    shown = [[row["way"], *(f"{value:.2f}" for value in list(row.values())[1:4])] for row in rows]
    print_table(console, f"{options.mib} MiB over loopback, processor seconds", columns, shown)
    write_result(options, PROGRAM, argv, {"rows": rows}, repeats=options.repeats)
    return 0


if __name__ == "__main__":
    run(main)
