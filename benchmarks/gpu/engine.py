"""Model and sampling on the device, without sockets: prefill throughput, and decode steps compared with their floor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.chip import Chip
from benchmarks.gpu.model import random_model
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Timer
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.recorded_steps import GraphRecorder, PlainRecorder
from common.engine.run.runner import ModelRunner
from common.engine.run.seats import FROM_HOST
from kernels import Draw, SamplingTensors, sample, to_host

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the norm: padded products may be summed in another order, through all layers."""
KV_SHARE = 0.7
"""Share of the memory that is free after loading the weights. The rest is for steps and their recordings."""


def measure_engine(shape: GPUShape, chip: Chip, timer: Timer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows, each with its kind: "prefill" or "decode". Steps whose KV does not fit have the reason instead."""
    device = timer.device
    model = random_model(shape, device)
    block_bytes = shape.token_bytes * shape.num_layers * shape.block_size
    room = 2**40 if device.type == "cpu" else int(KV_SHARE * torch.cuda.mem_get_info(device)[0]) // block_bytes
    needed = {step: step[0] * (-(-step[1] // shape.block_size) + 1) for step in shape.engine_steps}
    fitting = [step for step in shape.engine_steps if needed[step] <= room]
    prompts = [length for length in shape.engine_prompts if -(-length // shape.block_size) <= room]
    num_blocks = max([needed[step] for step in fitting] + [-(-length // shape.block_size) for length in prompts])
    kv = KVCache(shape.config, num_blocks, shape.block_size, shape.dtype, device)
    plain = ModelRunner(model, kv)
    graphs = recorded(model, kv, shape, [batch for batch, _ in fitting], max(context for _, context in fitting))
    for step in shape.engine_steps:
        if step in fitting:
            yield "decode", launched_row(graphs, shape, *step, chip)
        else:
            reason = f"{needed[step]:,} blocks of {block_bytes:,} bytes do not fit"
            yield "decode", {"how": "recorded", "batch": step[0], "context": step[1], "skipped": reason}
    for length in prompts:
        yield "prefill", prefill_row(plain, shape, length, chip, timer)
    for step in fitting[:2]:
        yield "decode", decode_row(plain, shape, *step, chip, timer)


def recorded(
    model: Decoder, kv: KVCache, shape: GPUShape, batches: Sequence[int] = (), context: int = 0
) -> GraphRunner:
    """Create a decode worker's graph runner for the largest of `batches`; default: the batches of single kernels."""
    recorder = GraphRecorder(kv.device) if kv.device.type == "cuda" else PlainRecorder()
    longest = (context or shape.decode_context) + shape.block_size
    most = max(batches or shape.decode_batches)
    return GraphRunner(model, kv, recorder, max_num_seqs=most, max_model_len=longest)


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


def decode_row(
    runner: ModelRunner, shape: GPUShape, batch: int, context: int, chip: Chip, timer: Timer
) -> dict[str, Any]:
    """Steps launched kernel by kernel, the tokens read after each."""
    rows = SamplingTensors.pack([Draw()] * batch, timer.device)

    def run() -> None:
        sample(runner.forward(_chunks(shape, batch, context)), rows).tolist()

    return _decode_row("kernel by kernel", shape, batch, context, chip, timer.waited(run))


class PendingTokens:
    """The tokens of a launched step, which are being copied to the host."""

    def __init__(self, ids: Tensor) -> None:
        self._host, self._event = to_host(ids), torch.cuda.Event() if ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._host.tolist()
        return ids


def launched_row(runner: GraphRunner, shape: GPUShape, batch: int, context: int, chip: Chip) -> dict[str, Any]:
    """Time recorded steps, each launched before the tokens of the previous step are read, as in a decode worker."""
    chunks = _chunks(shape, batch, context)
    before: PendingTokens | None = None

    def steps(count: int, sources: Sequence[int]) -> None:
        nonlocal before
        for _ in range(count):
            runner.launch(chunks, sources)
            launched = PendingTokens(runner.draw(batch))
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
    return _decode_row("recorded", shape, batch, context, chip, seconds)


def _decode_row(how: str, shape: GPUShape, batch: int, context: int, chip: Chip, seconds: float) -> dict[str, Any]:
    """The floor reads every weight and every key and value once."""
    num_bytes = shape.matrix_elements * shape.dtype.itemsize + batch * context * shape.token_bytes * shape.num_layers
    floor = num_bytes / chip.copy_rate
    return {
        "how": how,
        "batch": batch,
        "context": context,
        "skipped": "",
        "ms": round(seconds * 1000, 3),
        "floor_ms": round(floor * 1000, 3),
        "times_floor": round(seconds / floor, 3),
        "tokens_per_s": round(batch / seconds, 1),
    }


def _chunks(shape: GPUShape, batch: int, context: int) -> list[SequenceChunk]:
    """Create chunks of the last token of `batch` sequences of `context` tokens. Each sequence has its own blocks."""
    blocks = -(-context // shape.block_size)
    return [
        SequenceChunk((i % shape.vocab_size,), context - 1, range(i * blocks, (i + 1) * blocks)) for i in range(batch)
    ]


def engine_problem(shape: GPUShape, device: torch.device) -> str:
    """Whether recorded steps, padded and fed by each other, give the logits of plain ones: "" or what differs."""
    few, start = max(shape.decode_batches), shape.block_size - 2  # so that the steps cross into another block
    model = random_model(shape, device)
    kv = KVCache(shape.config, 2 * few, shape.block_size, shape.dtype, device)
    plain, graphs = ModelRunner(model, kv), recorded(model, kv, shape)
    for i in range(few):
        tokens = [(7 * i + j) % shape.vocab_size for j in range(start)]
        plain.forward([SequenceChunk(tokens, 0, (2 * i, 2 * i + 1), sample=False)])
    for count in {1, few - 1}:  # one row alone, and a padded step
        ids: Sequence[int] = [i % shape.vocab_size for i in range(count)]
        sources: Sequence[int] = [FROM_HOST] * count
        for position in range(start, start + 3):
            chunks = [SequenceChunk((ids[i],), position, (2 * i, 2 * i + 1)) for i in range(count)]
            expected = plain.forward(chunks).clone()
            # What the launched steps do not get from the host they must have from each other.
            hidden = [chunk._replace(token_ids=(0,)) for chunk in chunks] if sources == range(count) else chunks
            graphs.launch(hidden, sources)
            launched = PendingTokens(graphs.draw(count))
            error = float((graphs.logits[:count] - expected).norm() / expected.norm())
            if not error < LOGIT_TOLERANCE[shape.dtype]:
                return f"{count} sequences at position {position}: logits are off by {error:.2g} of their norm"
            ids, sources = launched.read(), range(count)
    return ""
