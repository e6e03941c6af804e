"""GB/s of Diptych's KV wire beside transfer engines over loopback, in turns: Mooncake over TCP, NIXL over TCP, and NIXL
through the transport that it picks on one host (shared memory). Blocks of one size go from one process to another.

    python -m benchmarks.compare.transfer --prepare DIR
    python -m benchmarks.compare.transfer --peer-env DIR
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import kv_wire
from benchmarks.block_path import Shape
from benchmarks.compare.peer import PeerError
from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, write_result

PROGRAM = "python -m benchmarks.compare.transfer"
TIMEOUT_S = 300.0
SYSTEM_PACKAGES = "Debian's libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"


@dataclass(frozen=True)
class TransferPeer:
    """An engine of `transfer_engine` and the environment variables that choose its transport."""

    name: str
    engine: str
    env: dict[str, str] = field(default_factory=dict)

    def command(self, env: Path, shape: Shape, repeats: int) -> list[str]:
        script = Path(__file__).with_name("transfer_engine.py")
        numbers = {"--num-blocks": shape.num_blocks, "--block-bytes": shape.block_bytes, "--repeats": repeats}
        flags = [str(word) for pair in numbers.items() for word in pair]
        return [str(env / "bin" / "python"), "-P", str(script), "--engine", self.engine, *flags]

    def run(self, env: Path, shape: Shape, repeats: int) -> list[float]:
        """GB/s of each counted write. Raises PeerError."""
        try:
            done = subprocess.run(
                self.command(env, shape, repeats),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env={**os.environ, **self.env},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{self.name}: {error}") from error
        if done.returncode != 0:
            raise PeerError(f"{self.name} failed (it needs {SYSTEM_PACKAGES})\n{done.stderr[-2000:]}")
        rates: list[float] = json.loads(done.stdout.splitlines()[-1])["gb_per_s"]
        return rates


TRANSFER_PEERS = (
    TransferPeer("Mooncake, TCP", "mooncake"),
    TransferPeer("NIXL, TCP", "nixl", {"UCX_TLS": "tcp"}),
    TransferPeer("NIXL, same host", "nixl"),
)


def steps(env: Path) -> list[tuple[str, ...]]:
    """The commands that install the engines into `env`, NIXL without its dependencies CUDA and torch."""
    pip = (str(env / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install")
    return [
        (sys.executable, "-m", "venv", str(env)),
        (*pip, "mooncake-transfer-engine-non-cuda", "numpy"),
        (*pip, "--no-deps", "nixl", "nixl-cu12"),
    ]


def measure(options: Namespace, shape: Shape, console: Console) -> tuple[dict[str, list[float]], list[str]]:
    """GB/s by path, and the failures. Every round runs each path once, after a write that does not count."""
    rates: dict[str, list[float]] = {}
    problems = []
    for number in range(options.repeats):
        console.print(f"round {number + 1} of {options.repeats}", highlight=False)
        for name, samples in kv_wire.measure(shape, 1).items():
            rates.setdefault(name, []).extend(samples)
        for peer in TRANSFER_PEERS:
            try:
                rates.setdefault(peer.name, []).extend(peer.run(options.peer_env, shape, 1))
            except PeerError as error:
                problems.append(str(error))
    return {name: samples for name, samples in rates.items() if samples}, problems


def rows(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a path: its median, and its ratio to each engine's median."""
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    engines = [peer.name for peer in TRANSFER_PEERS if peer.name in medians]
    return [
        {
            "path": name,
            "gb_per_s": round(rate, 3),
            "ratios": {engine: round(rate / medians[engine], 3) for engine in engines},
            "samples": [round(sample, 3) for sample in rates[name]],
        }
        for name, rate in medians.items()
    ]


def print_rows(console: Console, shown: Sequence[dict[str, Any]], shape: Shape) -> None:
    engines = [name for row in shown[:1] for name in row["ratios"]]
    cells = []
    for row in shown:
        numbers = [row["gb_per_s"], min(row["samples"]), max(row["samples"])]
        ratios = (f"{row['ratios'][engine]:.2f}x" for engine in engines)
        cells.append((row["path"], *(f"{number:.2f}" for number in numbers), *ratios))
    title = f"{shape.num_blocks} blocks of {shape.block_bytes:,} bytes over loopback"
    print_table(console, title, ("path", "GB/s", "min", "max", *(f"to {engine}" for engine in engines)), cells)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="install the engines into DIR and do no more")
    parser.add_argument("--peer-env", type=Path, metavar="DIR", help="where --prepare installed them")
    parser.add_argument("--block-bytes", type=int, default=2**20, help="bytes of one block")
    parser.add_argument("--mib", type=int, default=256, help="MiB to move each time")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    options = parser.parse_args(argv)
    if not options.prepare and not options.peer_env:
        parser.error("name the engines' environment with --peer-env, or install them with --prepare")
    return options


def main(argv: Sequence[str]) -> int:
    """Exit status 1 when an engine failed."""
    options = parse(argv)
    if options.prepare:
        return max(subprocess.run(step, check=False).returncode for step in steps(options.prepare.absolute()))
    num_blocks = max(1, options.mib * 2**20 // options.block_bytes)
    shape = Shape(options.block_bytes, num_blocks)
    console = open_console()
    rates, problems = measure(options, shape, console)
    shown = rows(rates)
    print_rows(console, shown, shape)
    for problem in problems:
        console.print(problem, highlight=False, markup=False)
    content = {"rows": shown, "problems": problems}
    write_result(options, PROGRAM, argv, content, repeats=options.repeats, block_bytes=shape.block_bytes)
    return int(bool(problems))


if __name__ == "__main__":
    run(main)
