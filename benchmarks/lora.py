"""The time of a step on a CPU by how many adapters its rows use, beside the same step without any.

Adapters are random, of all seven kinds of matrices. Rows take them in turn; with 0 adapters a step is the base model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from rich.console import Console

from benchmarks.load.report import open_console, print_table
from benchmarks.script import in_turns, run, script_parser, seconds_of, settings_of, write_result
from common.kv.cache import KVCache
from common.model.batch import SequenceChunk
from common.model.decoder import Decoder
from common.model.load import load_model
from common.model_files.resolve import resolve_model
from common.runner.runner import ModelRunner
from kernels import NO_ADAPTER, LoraPart, LoraSite

PROGRAM: Final = "python -m benchmarks.lora"
BLOCK_SIZE: Final = 16
CONTEXT: Final = 256
LOADS: Final = {
    **{"decode, batch 1": (1, 1), "decode, batch 8": (8, 1), "decode, batch 32": (32, 1)},
    "prefill of 512": (1, 512),
}
"""Sequences, and how many tokens each adds."""
COUNTS: Final = (0, 1, 4)


def main(argv: Sequence[str]) -> int:
    parser = script_parser(PROGRAM, __doc__, model="the base model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of its activations")
    parser.add_argument(
        "--quantization", default="none", choices=("none", "int8", "int4", "auto"), help="of its weights"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--threads", type=int, default=2, help="that compute a step")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind, of which the best counts")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        model = load_model(resolve_model(options.model), dtype=options.dtype, quantization=options.quantization)
        fill(model, max(COUNTS), options.rank)
        found = {name: times_of(model, *load, options.rounds) for name, load in LOADS.items()}
    show(open_console(), found, options.rank)
    write_result(options, PROGRAM, argv, {"settings": settings_of(options), "milliseconds": found})
    return 0


def fill(model: Decoder, count: int, rank: int) -> None:
    """Random adapters of this rank in every place."""
    for sites in model.add_sites(count, rank):
        for site in (sites.qkv, sites.output, sites.gate_up, sites.down):
            for place in range(count) if site is not None else ():
                assert site is not None
                site.set(place, list(random_parts(site, rank)))


def random_parts(site: LoraSite, rank: int) -> Iterator[LoraPart]:
    first = 0
    for outputs in site.parts:
        yield LoraPart(first, torch.randn(rank, site.in_features) / 100, torch.randn(outputs, rank) / 100)
        first += outputs


def times_of(model: Decoder, batch: int, num_tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the best of `rounds` steps, by the number of adapters, which take turns."""
    blocks = -(-(CONTEXT + num_tokens) // BLOCK_SIZE)
    runner = ModelRunner(model, KVCache(model.config, batch * blocks, BLOCK_SIZE, model.dtype))
    runner.kv.tensor.normal_(std=0.1)
    best: dict[str, float] = {}
    for number in range(rounds):
        for count in in_turns([count for count in COUNTS if count <= batch], number):
            chunks = [
                SequenceChunk(
                    (7,) * num_tokens,
                    CONTEXT,
                    range(i * blocks, (i + 1) * blocks),
                    adapter=i % count if count else NO_ADAPTER,
                )
                for i in range(batch)
            ]
            (seconds,) = seconds_of(partial(runner.forward, chunks), 1)
            best[str(count)] = min(best.get(str(count), math.inf), round(1e3 * seconds, 3))
    return best


def show(console: Console, found: Mapping[str, Mapping[str, float]], rank: int) -> None:
    rows = [
        (name, *(f"{times[str(count)]:.2f}" if str(count) in times else "-" for count in COUNTS))
        for name, times in found.items()
    ]
    columns = ("milliseconds a step", *(f"{count} adapters" for count in COUNTS))
    print_table(console, f"Adapters of rank {rank}", columns, rows)


if __name__ == "__main__":
    run(main)
