"""The time of a step on a CPU, operation by operation, beside its floor.

The floor of a matrix product is the larger of its weights' bytes over the rate at which this machine reads memory, and
its multiplications over the rate of the same kernel on a matrix that stays in the cache. The floor of attention is the
same with the bytes of keys and values and the rate of the dtype. The rates are measured first.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch
from rich.console import Console

from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, seconds_of, write_result
from common.engine.kv.cache import SMALL_DTYPES, KVCache, block_bytes
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.models.mlp import MLP
from common.engine.run.runner import ModelRunner
from common.model_files.resolve import resolve_model
from kernels import Linear, quantise
from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.large_pages import Arena

PROGRAM: Final = "python -m benchmarks.cpu"
BLOCK_SIZE: Final = 16
CACHED_ROWS, CACHED_OUT, CACHED_IN = 480, 256, 576  # 144 KiB of int8 weights: they never leave the cache
BITS: Final = {"none": 16, "int8": 8, "int4": 4, "auto": 4}


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` sequences of `context` tokens before this step, each of which adds `num_tokens`."""

    name: str
    batch: int
    num_tokens: int
    context: int


LOADS: Final = (
    Load("decode, batch 1", 1, 1, 256),
    Load("decode, batch 8", 8, 1, 256),
    Load("decode, batch 32", 32, 1, 256),
    Load("decode, batch 32, after 1,024", 32, 1, 1024),
    Load("prefill of 512", 1, 512, 0),
    Load("prefill of 512 after 512", 1, 512, 512),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of reading memory, of products with the quantised weights, and of products in the dtype, as attention has them.

    A multiplication and an addition are two operations.
    """

    bytes_per_s: float
    operations_per_s: float
    dtype_operations_per_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds of one operation over a whole step; `floor_ms` is 0 where it has no floor."""

    name: str
    ms: float
    floor_ms: float


def measure_rates(native: NativeBackend, quantization: str, dtype: torch.dtype) -> Rates:
    memory = Arena().take(2**28).fill_(1)  # beyond any cache, in pages as the weights are
    reading = min(seconds_of(lambda: native.read(memory), 8))
    plain = multiplication_rate(native, "none", dtype)
    quantised = plain if quantization == "none" else multiplication_rate(native, quantization, dtype)
    return Rates(memory.numel() / reading, quantised, plain)


def multiplication_rate(native: NativeBackend, quantization: str, dtype: torch.dtype) -> float:
    """Operations a second with a matrix that stays in the cache."""
    dense, bits = torch.randn(CACHED_OUT, CACHED_IN), BITS[quantization]
    weight = dense.to(dtype) if bits == 16 else quantise(dense, bits)
    assert weight is not None  # whole groups
    packed = Linear(weight, dtype=dtype).native
    assert packed is not None  # the native backend is there
    x = torch.randn(CACHED_ROWS, CACHED_IN).to(dtype)
    seconds = min(seconds_of(lambda: native.linear(x, packed, "", False), 100))
    if packed.quantised:
        seconds -= min(seconds_of(lambda: native.quantise(x, packed), 100))
    return 2 * CACHED_ROWS * CACHED_OUT * CACHED_IN / seconds


def run_load(model: Decoder, load: Load, rounds: int, kv_dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """Mean seconds of a step, and of each of its operations."""
    blocks = -(-(load.context + load.num_tokens) // BLOCK_SIZE)
    runner = ModelRunner(model, KVCache(model.config, load.batch * blocks, BLOCK_SIZE, kv_dtype))
    tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in range(load.batch)]
    random = torch.Generator().manual_seed(0)
    for table in tables:
        if load.context:
            tokens = torch.randint(0, model.config.vocab_size, (load.context,), generator=random).tolist()
            runner.forward([SequenceChunk(tokens, 0, table)])
    new = torch.randint(0, model.config.vocab_size, (load.batch, load.num_tokens), generator=random).tolist()
    chunks = [SequenceChunk(tokens, load.context, table) for tokens, table in zip(new, tables, strict=True)]
    program = model.program
    assert program is not None  # `main` checked that the native kernels are there
    for _ in range(2):
        runner.forward(chunks)
    program.time_operations()
    seconds = seconds_of(lambda: runner.forward(chunks), rounds)
    return sum(seconds) / rounds, {name: total / rounds for name, total in program.timings().items()}


def floor_of(name: str, model: Decoder, load: Load, rates: Rates, kv_dtype: torch.dtype) -> float:
    """Least seconds of an operation over all layers of a step; 0 where it is not counted."""
    config = model.config
    if name == "attend":
        num_bytes = load.batch * (load.context + load.num_tokens) * block_bytes(config, 1, kv_dtype)
        pairs = load.batch * load.num_tokens * (load.context + (load.num_tokens + 1) / 2)
        each = config.head_dim + (config.latent_dim or config.head_dim)  # of scores, and of the sum of values
        work = 2 * pairs * config.num_layers * config.num_heads * each
        return max(num_bytes / rates.bytes_per_s, work / rates.dtype_operations_per_s)
    head, seconds = model.weights.lm_head, 0.0
    for linear in matrices(model):
        weight = linear.native
        if weight is None or name != f"linear {linear.out_features}x{linear.in_features}":
            continue
        rows = load.batch if linear is head else load.batch * load.num_tokens
        work = 2 * rows * linear.out_features * linear.in_features
        seconds += max(weight.num_bytes / rates.bytes_per_s, work / rates.operations_per_s)
    return seconds


def matrices(model: Decoder) -> Iterator[Linear]:
    if model.weights.lm_head is not None:
        yield model.weights.lm_head
    for layer in model.weights.layers:
        yield from (layer.qkv, layer.output)
        if isinstance(layer.mlp, MLP):
            yield from (layer.mlp.gate_up, layer.mlp.down)


def report(console: Console, load: Load, step_s: float, parts: Sequence[Part]) -> None:
    whole, floor = sum(part.ms for part in parts), sum(part.floor_ms for part in parts)
    title = f"{load.name}: {step_s * 1e3:.2f} ms, {1 - whole / step_s / 1e3:.0%} outside of the kernels"
    rows = []
    for part in (*parts, Part("all", whole, floor)):
        ratio = (f"{part.floor_ms:.2f}", f"{part.ms / part.floor_ms:.2f}") if part.floor_ms else ("", "")
        rows.append((part.name, f"{part.ms:.2f}", f"{part.ms / step_s / 1e3:.0%}", *ratio))
    print_table(console, title, ("operation", "ms", "of the step", "floor, ms", "times the floor"), rows)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__, model="built-in name, folder or GGUF file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="number type of the model")
    parser.add_argument("--quantization", default="none", choices=tuple(BITS), help="format of the weights")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", *SMALL_DTYPES), help="number type of the KV cache"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for one per core")
    parser.add_argument("--rounds", type=int, default=20, help="steps per load")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options, console = parse(argv), open_console()
    native = native_backend()
    if native is None:
        console.print("there is no C++ compiler, so there are no native kernels to measure")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    files = resolve_model(options.model)
    results = []
    with torch.inference_mode():
        model = load_model(files, dtype=options.dtype, quantization=options.quantization)
        kv_dtype = SMALL_DTYPES.get(options.kv_cache_dtype, model.dtype)
        rates = measure_rates(native, options.quantization, model.dtype)
        console.print(
            f"{files.model_id}, {options.dtype}, {options.quantization}, {torch.get_num_threads()} threads: "
            f"reads memory at {rates.bytes_per_s / 1e9:.1f} GB/s, "
            f"multiplies at {rates.operations_per_s / 1e9:.0f} G operations/s"
        )
        for load in LOADS:
            if load.context + load.num_tokens > model.config.max_model_len:
                continue
            step_s, timings = run_load(model, load, options.rounds, kv_dtype)
            parts = [
                Part(name, seconds * 1e3, floor_of(name, model, load, rates, kv_dtype) * 1e3)
                for name, seconds in sorted(timings.items(), key=lambda item: -item[1])
            ]
            report(console, load, step_s, parts)
            results.append({"load": asdict(load), "step_ms": step_s * 1e3, "parts": [asdict(part) for part in parts]})
    content = {"rates": asdict(rates), "results": results}
    write_result(options, PROGRAM, argv, content, model=files.model_id, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    run(main)
