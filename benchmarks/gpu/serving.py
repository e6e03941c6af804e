"""The whole service over random weights on one device: router, workers and wire, aggregated and as two pools."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.gpu.model import write_folder
from benchmarks.gpu.shape import GPUShape
from benchmarks.load.client import CompletionClient, RequestOptions, ask_server, ask_token_ids
from benchmarks.load.load import Load
from benchmarks.load.summary import summarise
from benchmarks.load.workload import LengthRange, Vocabulary, Workload
from benchmarks.stack import Stack, StackProcess, StackSettings

AGGREGATED, POOLS = "aggregated", "1P1D"
WARMUP_INDEX = 10**9
READY_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 300.0


class RandomStack(Stack):
    """A stack whose workers have random weights."""

    def __init__(self, shape: GPUShape, settings: StackSettings) -> None:
        self._shape = shape
        super().__init__(settings)

    def _worker(self, role: str, index: int, flags: Sequence[str], cores: Sequence[int]) -> StackProcess:
        name = f"{role}-{index}"
        log = self.log_dir / f"{name}.log"
        own = ("--worker-id", name, "--address-file", str(log.with_suffix(".json")))
        command = [sys.executable, "-P", "-m", "benchmarks.gpu.worker", self._shape.name, role, *own, *flags]
        return StackProcess(name, role, command, log, cores)


def measure_serving(
    shape: GPUShape, device: torch.device, *, kv_memory_gib: float, num_requests: int, log_dir: Path | None = None
) -> Iterator[dict[str, Any]]:
    """One row an arm. Each worker takes `kv_memory_gib` beside its copy of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_folder(shape, Path(folder) / shape.name))
        for name, prefill in ((POOLS, 1), (AGGREGATED, 0)):
            stack = RandomStack(
                shape,
                StackSettings(
                    prefill,
                    1,
                    model=model,
                    dtype=shape.dtype_name,
                    worker_flags=_worker_flags(shape, device, kv_memory_gib),
                    prefill_flags=("--max-num-batched-tokens", str(shape.prefill_chunk)),
                    decode_flags=_decode_flags(shape, 1 - prefill),
                    router_flags=("--local-prefill-threshold", "0"),
                    log_dir=log_dir / name if log_dir else None,
                    ready_timeout_s=READY_TIMEOUT_S,
                ),
            )
            with stack:
                row = {"arm": name, **asyncio.run(_drive(shape, stack.url, num_requests))}
            yield row


def _worker_flags(shape: GPUShape, device: torch.device, kv_memory_gib: float) -> tuple[str, ...]:
    return (
        "--device",
        str(device),
        "--block-size",
        str(shape.block_size),
        "--kv-memory-gib",
        str(kv_memory_gib),
        "--max-model-len",
        str(shape.max_model_len),
        "--no-enable-prefix-caching",
    )


def _decode_flags(shape: GPUShape, prefills: int) -> tuple[str, ...]:
    """A worker that prefills itself computes a quarter of a chunk in a step."""
    flags = ("--max-num-seqs", str(max(shape.serving[2], 1)), "--max-draft-tokens", "0")
    return (*flags, "--local-prefill-chunk", str(max(1, shape.prefill_chunk // 4))) if prefills else flags


async def _drive(shape: GPUShape, url: str, num_requests: int) -> dict[str, Any]:
    """Closed loop, greedy, no end tokens. Raises RuntimeError when a request fails."""
    prompt_len, output_len, concurrency = shape.serving
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as asking:
        model = ask_server(asking, "").model
        vocabulary = Vocabulary(ask_token_ids(asking, model, 0))
    client = CompletionClient(url, RequestOptions(model, timeout_s=REQUEST_TIMEOUT_S))
    workload = Workload(vocabulary, LengthRange(prompt_len, prompt_len), LengthRange(output_len, output_len), seed=1)
    warmup = Load(client, workload, num_requests=concurrency, first_index=WARMUP_INDEX)
    await warmup.closed_loop(concurrency)
    run = Load(client, workload, num_requests=num_requests)
    await run.closed_loop(concurrency)
    await client.close()
    failed = [record for record in (*warmup.records, *run.records) if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0].outcome}: {failed[0].message}")
    summary = summarise(run.records)
    return {
        "requests": num_requests,
        "prompt": prompt_len,
        "output": output_len,
        "in_flight": concurrency,
        "output_tokens_per_s": round(summary.output_tokens_per_s, 1),
        "input_tokens_per_s": round(summary.input_tokens_per_s, 1),
        "ttft_p50_ms": round(summary.ttft_ms.p50, 1),
        "tpot_p50_ms": round(summary.tpot_ms.p50, 2),
        "itl_p99_ms": round(summary.itl_ms.p99, 2),
    }
