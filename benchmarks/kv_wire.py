"""GB/s of KV blocks through the workers' own sender and receiver, over loopback TCP and through shared memory.

Two processes. Every path moves the same number of bytes, the paths take turns, and medians are reported. The floors, in
the same run: raw TCP with 128 KiB writes (what iperf3 does) and with 1 MiB writes, and a copy from memory to memory in
one process. Then KVSender to KVReceiver, handshake and acknowledgement included: over one and several sockets, through
shared memory, and both with the checksum switched off on both sides, which the workers never do; over a socket in 8-bit
numbers, in GB/s of the bfloat16 that they stand for; with --curve also encrypted over sockets. A ratio to a floor is
the median of the rounds' ratios.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import zmq
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import raw_tcp
from benchmarks.conditions import conditions
from benchmarks.plot import save
from benchmarks.quantised_blocks import HEAD_BYTES, bfloat16_cache, conversion_rates
from benchmarks.report import open_console, write_json
from benchmarks.time_limit import time_limit
from common.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.kv.shared_memory import SharedMemory
from common.machine.allocator import keep_large_buffers
from common.transfer import frames as kv_frames
from common.transfer.incoming import IncomingTransfer
from common.transfer.outgoing import TransferEnded
from common.transfer.receiver import KVReceiver, TransferCompleted, TransferFailed, TransferOpened
from common.transfer.sender import KVSender
from common.wire.curve import Curve
from common.wire.curve_keys import KeyPair
from common.wire.gatekeeper import Gatekeeper
from common.wire.messages import KVDone, KVGrant, KVMemory, KVTarget

PROGRAM = "python -m benchmarks.kv_wire"
# 16 tokens of SmolLM2-135M in bfloat16: 30 layers x 3 KV heads x 16 slots x (K and V) x 64 values x 2 bytes
BLOCK_BYTES = 30 * 3 * 16 * 2 * 64 * 2
RAW_WRITES = {"raw TCP, 128 KiB writes": 128 * 1024, "raw TCP, 1 MiB writes": 1024 * 1024}
COPY = "copy in memory"
NUM_STREAMS = (1, 2, 4)
TIMEOUT_S = 60.0
SEND_CORE, RECEIVE_CORE = 0, 1

_CHECKSUM = kv_frames.checksum


def _no_checksum(block: memoryview) -> int:
    return 0


@dataclass(frozen=True)
class Shape:
    """What is moved: `num_blocks` blocks of `block_bytes`; and how ZeroMQ and the processes are set up."""

    block_bytes: int
    num_blocks: int
    io_threads: int
    pinned: bool

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def pin(self, core: int) -> None:
        """Before the process has threads, which inherit it."""
        if self.pinned:
            os.sched_setaffinity(0, {core})


def serve_raw(pipe: Connection, shape: Shape) -> None:
    """Body of the process that receives raw TCP."""
    shape.pin(RECEIVE_CORE)
    raw_tcp.serve(pipe, shape.num_bytes)


def serve_blocks(
    pipe: Connection, shape: Shape, checksum: bool, pair: KeyPair | None = None, *, quantised: bool = False
) -> None:
    """Body of the process that receives KV: grants whatever is announced into the same blocks, as an engine would."""
    shape.pin(RECEIVE_CORE)
    keep_large_buffers()  # as a worker does
    if not checksum:
        kv_frames.checksum = _no_checksum
    cache = np.ones((shape.num_blocks, shape.block_bytes), np.uint8)
    events: SimpleQueue[TransferOpened | TransferCompleted | TransferFailed] = SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shape.io_threads)
    curve = Curve(pair) if pair else None
    if curve is not None:
        Gatekeeper(context, curve).start()
    receiver = KVReceiver(context, "127.0.0.1", 0, lambda index: cache[index].data, events.put, curve=curve)
    if quantised:
        receiver.take_quantised(quantised_incoming(bfloat16_cache(shape.block_bytes, shape.num_blocks)))
    receiver.start()
    pipe.send(receiver.address)
    while True:
        match events.get():
            case TransferOpened(peer, opened, now, memory):
                name, attempt, blocks = opened.request_id, opened.attempt, range(opened.num_blocks)
                if opened.memory is not None and memory is None:
                    raise RuntimeError("the sender's memory cannot be read here")
                shared = memory is not None
                receiver.expect(
                    IncomingTransfer(name, attempt, peer, blocks, 0, now, now, memory=memory, quantised=quantised)
                )
                grant = KVGrant(request_id=name, attempt=attempt, first_block=0, shared=shared, quantised=quantised)
                receiver.send(peer, grant)
            case TransferFailed(reason=reason):
                raise RuntimeError(reason)


class BlockPath:
    """A KVSender connected to a receiving process, which reads `memory` if any; `run` moves all blocks once."""

    def __init__(
        self,
        address: str,
        shape: Shape,
        cache: NDArray[np.uint8],
        *,
        num_streams: int = 1,
        checksum: bool = True,
        memory: KVMemory | None = None,
        pair: KeyPair | None = None,
        quantise: Callable[[int], memoryview] | None = None,
    ) -> None:
        self._shape, self._checksum, self._count = shape, checksum, 0
        self._target = KVTarget("receiver", 1, address)
        self._ended: SimpleQueue[TransferEnded] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shape.io_threads)
        self._sender = KVSender(
            self._context,
            lambda index: cache[index].data,
            shape.block_bytes,
            ("sender", 1, "fingerprint"),
            self._ended.put,
            lease_s=TIMEOUT_S,
            num_streams=num_streams,
            memory=memory,
            curve=Curve(pair) if pair else None,
            quantise=quantise,
        )
        self._sender.start()

    def run(self) -> float:
        """Seconds from announcing the blocks to the acknowledgement that all landed. Raises RuntimeError."""
        kv_frames.checksum = _CHECKSUM if self._checksum else _no_checksum
        self._count += 1
        name, count = f"transfer-{self._count}", self._shape.num_blocks
        begin = time.perf_counter()
        self._sender.open(name, 0, self._target, list(range(count)), count)
        self._sender.progress(name, 0, count, KVDone(request_id=name, attempt=0, first_token=0))
        ended = self._ended.get(timeout=TIMEOUT_S)
        seconds = time.perf_counter() - begin
        if ended.reason:
            raise RuntimeError(ended.reason)
        return seconds

    def close(self) -> None:
        self._sender.stop()
        self._context.term()


class Peers:
    """The receiving processes: started on demand, ended with the `with` block."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []

    def start(self, body: Callable[..., None], *arguments: object) -> Any:
        """What the process says first: where it listens."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        self._processes.append(process)
        theirs.close()
        with ours:
            return self._first_word(ours)

    @staticmethod
    def _first_word(ours: Connection) -> Any:
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError("the receiving process said nothing")
        return ours.recv()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10.0)
            process.kill()
            process.join(10.0)


def copy_in_memory(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    """Seconds to copy all blocks from one array to another: what no transfer through memory can beat on one core."""
    begin = time.perf_counter()
    for block, place in zip(source, target, strict=True):
        np.copyto(place, block)
    return time.perf_counter() - begin


def curve_name(num_streams: int) -> str:
    return f"{socket_name(num_streams)}, CURVE"


def socket_name(num_streams: int) -> str:
    return f"KV, {num_streams} socket{'s' * (num_streams > 1)}"


def measure(shape: Shape, repeats: int, *, curve: bool = False) -> dict[str, list[float]]:
    """GB/s by path, one sample a repeat. A first round that warms buffers and connections up is not counted."""
    shape.pin(SEND_CORE)
    shared = SharedMemory(shape.num_bytes)
    flat = memoryview(shared.pages)[: shape.num_bytes]
    cache = np.frombuffer(flat, np.uint8).reshape(shape.num_blocks, shape.block_bytes)
    cache[:] = np.random.default_rng(0).integers(0, 256, cache.shape, np.uint8)
    target = np.ones_like(cache)
    with Peers() as peers:
        port = peers.start(serve_raw, shape)
        paths: dict[str, Callable[[], float]] = {
            name: lambda size=size: raw_tcp.send(port, flat, shape.num_bytes, size)  # type: ignore[misc]
            for name, size in RAW_WRITES.items()
        }
        paths[COPY] = lambda: copy_in_memory(cache, target)
        checked, unchecked = (peers.start(serve_blocks, shape, checksum) for checksum in (True, False))
        blocks = {socket_name(n): BlockPath(checked, shape, cache, num_streams=n) for n in NUM_STREAMS}
        if curve:
            pair = KeyPair.generate()
            secured = peers.start(serve_blocks, shape, True, pair)
            for n in NUM_STREAMS:
                blocks[curve_name(n)] = BlockPath(secured, shape, cache, num_streams=n, pair=pair)
        if shape.block_bytes % HEAD_BYTES == 0:
            there = peers.start(functools.partial(serve_blocks, quantised=True), shape, True)
            view = quantised_outgoing(bfloat16_cache(shape.block_bytes, shape.num_blocks)).view
            blocks["KV, 1 socket, fp8"] = BlockPath(there, shape, cache, quantise=view)
        blocks["KV, shared memory"] = BlockPath(checked, shape, cache, memory=shared.offer)
        blocks["KV, 1 socket, no checksum"] = BlockPath(unchecked, shape, cache, checksum=False)
        blocks["KV, shared memory, no checksum"] = BlockPath(
            unchecked, shape, cache, checksum=False, memory=shared.offer
        )
        paths.update({name: path.run for name, path in blocks.items()})
        rates: dict[str, list[float]] = {name: [] for name in paths}
        for repeat in track(range(repeats + 1), "rounds"):
            for name in sorted(paths, reverse=bool(repeat % 2)):
                rate = shape.num_bytes / paths[name]() / 1e9
                if repeat:
                    rates[name].append(rate)
        for path in blocks.values():
            path.close()
    return rates


def of_plain(rates: dict[str, list[float]], num_streams: int) -> float:
    """Median over the rounds of the encrypted rate's ratio to the plain one."""
    pairs = zip(rates[curve_name(num_streams)], rates[socket_name(num_streams)], strict=True)
    return round(statistics.median(secured / plain for secured, plain in pairs), 3)


def checksum_rate(shape: Shape, rounds: int = 3) -> float:
    """GB/s of the checksum alone, on one core, from memory."""
    cache = np.ones((shape.num_blocks, shape.block_bytes), np.uint8)
    begin = time.perf_counter()
    for _ in range(rounds):
        for block in cache:
            _CHECKSUM(block.data)
    return rounds * shape.num_bytes / (time.perf_counter() - begin) / 1e9


def compare(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a path: median GB/s, and the median over the rounds of its ratio to each floor."""
    floors = dict(
        zip(("of_raw_128k", "of_raw_1m", "of_copy"), (rates[name] for name in (*RAW_WRITES, COPY)), strict=True)
    )

    def ratio(samples: list[float], floor: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(samples, floor, strict=True)), 3)

    return [
        {
            "path": name,
            "gb_per_s": round(statistics.median(samples), 3),
            **{key: ratio(samples, floor) for key, floor in floors.items()},
            "samples": [round(sample, 3) for sample in samples],
        }
        for name, samples in rates.items()
    ]


def print_rows(console: Console, rows: Sequence[dict[str, Any]], shape: Shape) -> None:
    where = f"sender on core {SEND_CORE}, receiver on core {RECEIVE_CORE}" if shape.pinned else "processes not pinned"
    table = Table(
        title=f"{shape.num_bytes / 2**20:,.0f} MiB in blocks of {shape.block_bytes:,} bytes, {where}",
        title_justify="left",
    )
    table.add_column("path")
    for name in ("GB/s", "of raw 128 KiB", "of raw 1 MiB", "of a copy", "min", "max"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = (f"{row[name]:.0%}" for name in ("of_raw_128k", "of_raw_1m", "of_copy"))
        rates = (f"{rate:.2f}" for rate in (min(row["samples"]), max(row["samples"])))
        table.add_row(row["path"], f"{row['gb_per_s']:.2f}", *ratios, *rates)
    console.print(table)


def plot(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Medians as bars, samples as dots."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = [row["path"] for row in rows]
    axes.barh(names, [row["gb_per_s"] for row in rows], color="#2f6fb5", alpha=0.6)
    for row in rows:
        axes.plot(row["samples"], [row["path"]] * len(row["samples"]), ".", color="#222222", markersize=4)
    axes.set(xlabel="GB/s, median and samples")
    axes.invert_yaxis()
    save(figure, path, title)


def parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES, help="bytes of one KV block")
    parser.add_argument("--mib", type=int, default=256, help="MiB to move each time")
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds of all paths")
    parser.add_argument("--io-threads", type=int, default=1, help="ZeroMQ's threads in each process")
    parser.add_argument("--curve", action="store_true", help="measure encrypted connections too")
    parser.add_argument("--pin", action="store_true", help="sender on core 0, receiver on core 1")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the result into this PNG file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    num_blocks = max(1, options.mib * 2**20 // options.block_bytes)
    shape = Shape(options.block_bytes, num_blocks, options.io_threads, options.pin)
    rates = measure(shape, options.repeats, curve=options.curve)
    rows = compare(rates)
    hashing = round(checksum_rate(shape), 2)
    console = open_console()
    print_rows(console, rows, shape)
    console.print(f"the checksum alone: {hashing} GB/s on one core", highlight=False)
    converting = conversion_rates(shape.block_bytes, 64) if shape.block_bytes % HEAD_BYTES == 0 else {}
    for name, rate in converting.items():
        console.print(f"{name} alone: {rate:.2f} GB/s of bfloat16 on one core", highlight=False)
    encrypted = {n: of_plain(rates, n) for n in NUM_STREAMS if options.curve}
    for num_streams, share in encrypted.items():
        console.print(f"{curve_name(num_streams)}: {share:.0%} of the rate without", highlight=False)
    if options.output:
        found = conditions(PROGRAM, argv, zmq=zmq.zmq_version(), pinned=options.pin, repeats=options.repeats)
        shown = {"block_bytes": shape.block_bytes, "num_bytes": shape.num_bytes, "checksum_gb_per_s": hashing}
        shown |= {f"{name}_gb_per_s": rate for name, rate in converting.items()}
        curve = {"curve_of_plain": encrypted} if encrypted else {}
        write_json(options.output, {"conditions": found | shown, "rows": rows, **curve})
    if options.plot:
        plot(options.plot, rows, f"KV on one machine, blocks of {shape.block_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    with time_limit(0.0):  # told to end, it ends what it started
        raise SystemExit(main())
