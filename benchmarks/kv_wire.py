"""GB/s of KV blocks through the workers' own sender and receiver, over loopback TCP and through shared memory.

Two processes. Every path moves the same number of bytes, the paths take turns, and medians are reported. The floors, in
the same run: raw TCP with 128 KiB writes (iperf3's) and with 1 MiB writes, and a copy from memory to memory in one
process. Then KVSender to KVReceiver, handshake and acknowledgement included: over one and several sockets, through
shared memory, through a ring of places as from a GPU, and the first two without the checksum, which the workers never
leave out; over a socket in 8-bit numbers, in GB/s of the bfloat16 that they stand for; with --curve encrypted, with
--nixl read by the receiver with NIXL, over what UCX_TLS allows. Ratios are medians of those of the rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks import raw_tcp
from benchmarks.block_path import (
    CHECKSUM,
    RECEIVE_CORE,
    BlockPath,
    Receivers,
    Shape,
    serve_blocks,
    serve_nixl_blocks,
    serve_quantised_blocks,
    serve_raw,
)
from benchmarks.load.plot import save
from benchmarks.load.report import open_console, print_table
from benchmarks.quantised_blocks import HEAD_BYTES, bfloat16_cache, conversion_rates
from benchmarks.script import in_turns, median_ratio, run, script_parser, seconds_of, write_result
from common.kv.block_ring import ring_for
from common.kv.copy_stream import CopyStream
from common.kv.quantised_staging import quantised_outgoing
from common.kv.shared_memory import SharedMemory
from common.kv.staging import StagedOutgoing
from common.transfer.nixl_agent import NixlAgent
from common.transfer.remote_memory import OfferedMemory
from common.wire.curve_keys import KeyPair

PROGRAM = "python -m benchmarks.kv_wire"
# 16 tokens of SmolLM2-135M in bfloat16: 30 layers x 3 KV heads x 16 slots x (K and V) x 64 values x 2 bytes
BLOCK_BYTES = 30 * 3 * 16 * 2 * 64 * 2
RAW_WRITES = {"raw TCP, 128 KiB writes": 128 * 1024, "raw TCP, 1 MiB writes": 1024 * 1024}
COPY = "copy in memory"
NUM_STREAMS = (1, 2, 4)
SEND_CORE = 0


def copy_in_memory(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    """Seconds to copy all blocks from one array to another, the floor of a transfer through memory on one core."""
    begin = time.perf_counter()
    for block, place in zip(source, target, strict=True):
        np.copyto(place, block)
    return time.perf_counter() - begin


def curve_name(num_streams: int) -> str:
    return f"{socket_name(num_streams)}, CURVE"


def socket_name(num_streams: int) -> str:
    return f"KV, {num_streams} socket{'s' * (num_streams > 1)}"


def measure(shape: Shape, repeats: int, *, curve: bool = False, nixl: bool = False) -> dict[str, list[float]]:
    """GB/s by path, one sample a repeat. A first round warms up buffers and connections and does not count."""
    shape.pin(SEND_CORE)
    shared = SharedMemory(shape.num_bytes)
    flat = memoryview(shared.pages)[: shape.num_bytes]
    cache = np.frombuffer(flat, np.uint8).reshape(shape.num_blocks, shape.block_bytes)
    cache[:] = np.random.default_rng(0).integers(0, 256, cache.shape, np.uint8)
    target = np.ones_like(cache)

    def view(index: int) -> memoryview:
        return memoryview(cache[index])

    with Receivers() as receivers:
        port = receivers.start(serve_raw, shape)
        paths: dict[str, Callable[[], float]] = {
            name: lambda size=size: raw_tcp.send(port, flat, shape.num_bytes, size)  # type: ignore[misc]
            for name, size in RAW_WRITES.items()
        }
        paths[COPY] = lambda: copy_in_memory(cache, target)
        checked, unchecked = (receivers.start(serve_blocks, shape, checksum) for checksum in (True, False))
        blocks = {socket_name(n): BlockPath(checked, shape, view, num_streams=n) for n in NUM_STREAMS}
        if curve:
            pair = KeyPair.generate()
            secured = receivers.start(serve_blocks, shape, True, pair)
            for n in NUM_STREAMS:
                blocks[curve_name(n)] = BlockPath(secured, shape, view, num_streams=n, pair=pair)
        if shape.block_bytes % HEAD_BYTES == 0:
            quantised = receivers.start(serve_quantised_blocks, shape, True)
            quantise = quantised_outgoing(bfloat16_cache(shape.block_bytes, shape.num_blocks)).views
            blocks["KV, 1 socket, fp8"] = BlockPath(quantised, shape, view, quantise=quantise)
            device = bfloat16_cache(shape.block_bytes, shape.num_blocks)
            ring = ring_for(StagedOutgoing(device, CopyStream(device.device)), shape.num_blocks)
            blocks["KV, through a ring"] = BlockPath(checked, shape, view, ring=ring)
        if nixl:
            region = (cache.ctypes.data, cache.nbytes)
            remote = OfferedMemory(NixlAgent("sender"), region, is_ring=False)
            reader = receivers.start(serve_nixl_blocks, shape, True)
            blocks["KV, NIXL"] = BlockPath(reader, shape, view, remote=remote)
        blocks["KV, shared memory"] = BlockPath(checked, shape, view, memory=shared.offer)
        blocks["KV, 1 socket, no checksum"] = BlockPath(unchecked, shape, view, checksum=False)
        blocks["KV, shared memory, no checksum"] = BlockPath(
            unchecked, shape, view, checksum=False, memory=shared.offer
        )
        paths.update({name: path.run for name, path in blocks.items()})
        rates: dict[str, list[float]] = {name: [] for name in paths}
        for repeat in track(range(repeats + 1), "rounds"):
            for name in in_turns(tuple(paths), repeat):
                rate = shape.num_bytes / paths[name]() / 1e9
                if repeat:
                    rates[name].append(rate)
        for path in blocks.values():
            path.close()
    return rates


def checksum_rate(shape: Shape, rounds: int = 3) -> float:
    """GB/s of the checksum alone, on one core, from memory."""
    cache = np.ones((shape.num_blocks, shape.block_bytes), np.uint8)

    def hash_all() -> None:
        for block in cache:
            CHECKSUM(block.data)

    return rounds * shape.num_bytes / sum(seconds_of(hash_all, rounds)) / 1e9


def compare(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a path: median GB/s, and the median over the rounds of its ratio to each floor."""
    floors = dict(
        zip(("of_raw_128k", "of_raw_1m", "of_copy"), (rates[name] for name in (*RAW_WRITES, COPY)), strict=True)
    )
    return [
        {
            "path": name,
            "gb_per_s": round(statistics.median(samples), 3),
            **{key: median_ratio(samples, floor) for key, floor in floors.items()},
            "samples": [round(sample, 3) for sample in samples],
        }
        for name, samples in rates.items()
    ]


def print_rows(console: Console, rows: Sequence[dict[str, Any]], shape: Shape) -> None:
    where = f"sender on core {SEND_CORE}, receiver on core {RECEIVE_CORE}" if shape.pinned else "processes not pinned"
    title = f"{shape.num_bytes / 2**20:,.0f} MiB in blocks of {shape.block_bytes:,} bytes, {where}"
    shown = []
    for row in rows:
        ratios = (f"{row[name]:.0%}" for name in ("of_raw_128k", "of_raw_1m", "of_copy"))
        rates = (f"{rate:.2f}" for rate in (min(row["samples"]), max(row["samples"])))
        shown.append((row["path"], f"{row['gb_per_s']:.2f}", *ratios, *rates))
    print_table(console, title, ("path", "GB/s", "of raw 128 KiB", "of raw 1 MiB", "of a copy", "min", "max"), shown)


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
    parser = script_parser(PROGRAM, __doc__, plot=True)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES, help="bytes of one KV block")
    parser.add_argument("--mib", type=int, default=256, help="MiB to move each time")
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds of all paths")
    parser.add_argument("--io-threads", type=int, default=1, help="ZeroMQ's threads in each process")
    parser.add_argument("--curve", action="store_true", help="measure encrypted connections too")
    parser.add_argument("--nixl", action="store_true", help="measure reads with NIXL too, which must be installed")
    parser.add_argument("--pin", action="store_true", help="sender on core 0, receiver on core 1")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    num_blocks = max(1, options.mib * 2**20 // options.block_bytes)
    shape = Shape(options.block_bytes, num_blocks, options.io_threads, options.pin)
    rates = measure(shape, options.repeats, curve=options.curve, nixl=options.nixl)
    rows = compare(rates)
    hashing = round(checksum_rate(shape), 2)
    print_rows(console, rows, shape)
    console.print(f"the checksum alone: {hashing} GB/s on one core", highlight=False)
    converting = conversion_rates(shape.block_bytes, 64) if shape.block_bytes % HEAD_BYTES == 0 else {}
    for name, rate in converting.items():
        console.print(f"{name} alone: {rate:.2f} GB/s of bfloat16 on one core", highlight=False)
    encrypted = {n: median_ratio(rates[curve_name(n)], rates[socket_name(n)]) for n in NUM_STREAMS if options.curve}
    for num_streams, share in encrypted.items():
        console.print(f"{curve_name(num_streams)}: {share:.0%} of the rate without", highlight=False)
    content = {"rows": rows, **({"curve_of_plain": encrypted} if encrypted else {})}
    more: dict[str, Any] = {
        "block_bytes": shape.block_bytes,
        "num_bytes": shape.num_bytes,
        "checksum_gb_per_s": hashing,
    }
    more |= {f"{name}_gb_per_s": rate for name, rate in converting.items()}
    more |= {"ucx_tls": os.environ.get("UCX_TLS", "")} if options.nixl else {}
    more |= {"zmq": zmq.zmq_version(), "pinned": options.pin, "repeats": options.repeats}
    write_result(options, PROGRAM, argv, content, **more)
    if options.plot:
        plot(options.plot, rows, f"KV on one machine, blocks of {shape.block_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    run(main)
