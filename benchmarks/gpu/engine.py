"""Model and sampler on the device, without sockets: tokens a second of a prefill, a decode step against its floor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.chip import Chip
from benchmarks.gpu.model import random_model
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Timer
from common.kv.cache import KVCache
from common.model.batch import SequenceChunk
from common.model.decoder import Decoder
from common.runner.graph_capture import GraphRecorder, PlainRecorder
from common.runner.graph_runner import GraphRunner
from common.runner.runner import ModelRunner
from common.runner.seats import FROM_HOST
from common.runner.step_launcher import GraphStep, StepLauncher
from common.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the norm: padded products may be summed in another order, through all layers."""


def measure_engine(shape: GPUShape, chip: Chip, timer: Timer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows, each with its kind: "prefill" or "decode"."""
    device = timer.device
    model = random_model(shape, device)
    blocks_each = -(-shape.decode_context // shape.block_size) + 1
    longest = max(shape.prefill_lengths)
    num_blocks = max(blocks_each * max(shape.decode_batches), -(-longest // shape.block_size))
    kv = KVCache(shape.config, num_blocks, shape.block_size, shape.dtype, device)
    plain = ModelRunner(model, kv)
    for length in shape.prefill_lengths:
        yield "prefill", prefill_row(plain, shape, length, chip, timer)
    for batch in shape.decode_batches:
        yield "decode", decode_row(plain, shape, batch, chip, timer)
    graphs = recorded(model, kv, shape)
    for batch in shape.decode_batches:
        yield "decode", launched_row(graphs, shape, batch, chip)


def recorded(model: Decoder, kv: KVCache, shape: GPUShape) -> GraphRunner:
    """A graph runner as a decode worker makes it."""
    recorder = GraphRecorder(kv.device) if kv.device.type == "cuda" else PlainRecorder()
    longest = shape.decode_context + shape.block_size
    return GraphRunner(model, kv, recorder, max_num_seqs=max(shape.decode_batches), max_model_len=longest)


def prefill_row(runner: ModelRunner, shape: GPUShape, length: int, chip: Chip, timer: Timer) -> dict[str, Any]:
    """One prompt, in chunks of `prefill_chunk`."""
    tokens, table = [i % shape.vocab_size for i in range(length)], range(runner.kv.num_blocks)
    starts = range(0, length, shape.prefill_chunk)

    def run() -> None:
        for start in starts:
            chunk = tokens[start : start + shape.prefill_chunk]
            runner.forward([SequenceChunk(chunk, start, table, start + len(chunk) == length)])
        runner.wait()

    seconds = timer.waited(run)
    # The head sees only the last token of the prompt.
    body = shape.matrix_elements - shape.vocab_size * shape.hidden
    attention = 2 * length * (length + 1) * shape.num_heads * shape.head_dim * shape.num_layers
    num_flops = 2 * body * length + 2 * shape.vocab_size * shape.hidden + attention
    return {
        "tokens": length,
        "ms": round(seconds * 1000, 3),
        "tokens_per_s": round(length / seconds, 1),
        "tflop_per_s": round(num_flops / seconds / 1e12, 2),
        "of_matmul_rate": round(num_flops / seconds / chip.matmul_rate, 4),
    }


def decode_row(runner: ModelRunner, shape: GPUShape, batch: int, chip: Chip, timer: Timer) -> dict[str, Any]:
    """Steps launched kernel by kernel, the tokens read after each."""
    sampler, rows = Sampler(shape.vocab_size), [_row(shape)] * batch

    def run() -> None:
        sampler.sample(runner.forward(_chunks(shape, batch)), rows)

    return _decode_row("kernel by kernel", shape, batch, chip, timer.waited(run))


def launched_row(runner: GraphRunner, shape: GPUShape, batch: int, chip: Chip) -> dict[str, Any]:
    """Recorded steps, each launched before the tokens of the one before are read, as the engine does."""
    launcher, chunks = StepLauncher(runner, Sampler(shape.vocab_size)), _chunks(shape, batch)
    before: GraphStep | None = None

    def steps(count: int, sources: Sequence[int]) -> None:
        nonlocal before
        for _ in range(count):
            launched = launcher.launch(chunks, sources)
            launched.sample({})
            if before is not None:
                before.read()
            before = launched

    steps(1, [FROM_HOST] * batch)
    steps(3, range(batch))
    began = time.perf_counter()
    steps(shape.decode_steps, range(batch))
    seconds = (time.perf_counter() - began) / shape.decode_steps
    assert before is not None  # at least one step was launched
    before.read()
    return _decode_row("recorded", shape, batch, chip, seconds)


def _decode_row(how: str, shape: GPUShape, batch: int, chip: Chip, seconds: float) -> dict[str, Any]:
    """The floor reads every weight and every key and value once."""
    num_bytes = (
        shape.matrix_elements * shape.dtype.itemsize
        + batch * shape.decode_context * shape.token_bytes * shape.num_layers
    )
    floor = num_bytes / chip.copy_rate
    return {
        "how": how,
        "batch": batch,
        "context": shape.decode_context,
        "ms": round(seconds * 1000, 3),
        "floor_ms": round(floor * 1000, 3),
        "times_floor": round(seconds / floor, 3),
        "tokens_per_s": round(batch / seconds, 1),
    }


def _chunks(shape: GPUShape, batch: int) -> list[SequenceChunk]:
    """The last token of `batch` sequences of `decode_context` tokens, each with blocks of its own."""
    blocks = -(-shape.decode_context // shape.block_size)
    return [
        SequenceChunk((i % shape.vocab_size,), shape.decode_context - 1, range(i * blocks, (i + 1) * blocks))
        for i in range(batch)
    ]


def _row(shape: GPUShape) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), shape.decode_context)


def engine_problem(shape: GPUShape, device: torch.device) -> str:
    """Whether recorded steps, padded and fed by each other, give the logits of plain ones: "" or what differs."""
    few, start = max(shape.decode_batches), shape.block_size - 2  # so that the steps cross into another block
    model = random_model(shape, device)
    kv = KVCache(shape.config, 2 * few, shape.block_size, shape.dtype, device)
    plain, graphs = ModelRunner(model, kv), recorded(model, kv, shape)
    launcher = StepLauncher(graphs, Sampler(shape.vocab_size))
    for i in range(few):
        tokens = [(7 * i + j) % shape.vocab_size for j in range(start)]
        plain.forward([SequenceChunk(tokens, 0, (2 * i, 2 * i + 1), sample=False)])
    for count in {1, few - 1}:  # one row alone, and a padded step
        ids: Sequence[int] = [i % shape.vocab_size for i in range(count)]
        sources, pending = [FROM_HOST] * count, None
        for position in range(start, start + 3):
            chunks = [SequenceChunk((ids[i],), position, (2 * i, 2 * i + 1)) for i in range(count)]
            expected = plain.forward(chunks).clone()
            # What the launched steps do not get from the host they must have from each other.
            hidden = [SequenceChunk((0,), position, chunk.block_table) for chunk in chunks] if pending else chunks
            pending = launcher.launch(hidden, sources)
            pending.sample({})
            error = float((graphs.logits[:count] - expected).norm() / expected.norm())
            if not error < LOGIT_TOLERANCE[shape.dtype]:
                return f"{count} sequences at position {position}: logits are off by {error:.2g} of their norm"
            ids, sources = [token.token_id for token in pending.read()], list(range(count))
    return ""
