"""A worker of two ranks: recorded steps, launched ahead, beside the same steps kernel by kernel.

It runs in a process of its own, which ends without taking anything apart: a communicator of NCCL waits for the graphs
that hold its sums. `python -m benchmarks.gpu.node.ranks DEVICE FOLDER` prints a row as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.node.verdict import Verdict
from common.config import DecodeWorkerConfig
from common.engine.models.batch import SequenceChunk
from common.engine.ranks.loading import load_ranked
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.seats import FROM_HOST
from common.engine.run.step_launchers import GraphStep, StepLauncher
from common.engine.sampling.sampler import Sampler
from common.engine.worker.process import end_process
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model

RANKS, ROWS, NUM_STEPS, BLOCK_SIZE, PROMPT = 2, 5, 40, 64, 21
"""Five rows: a padded step."""
LIMIT_S = 300.0
"""For two processes that import torch, meet, compile kernels and record a few steps."""
WHAT, WANTED = "recorded steps of two ranks", "the same tokens, in less time"


def ranks_row(device: torch.device, folder: Path) -> dict[str, Any]:
    """Measured by another process. Raises RuntimeError with its last words when it fails or takes too long."""
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.node.ranks", str(device), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"two ranks have not ended within {LIMIT_S:g} s") from error
    if done.returncode:
        raise RuntimeError(f"two ranks ended with status {done.returncode}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def of_ranks(row: dict[str, Any]) -> Verdict:
    found = f"{row['other_tokens']} of {row['tokens']} tokens differ"
    times = f"{row['recorded_ms']:.2f} ms a step instead of {row['plain_ms']:.2f}"
    is_faster = row["recorded_ms"] < row["plain_ms"] or row["device"] == "cpu"  # which has nothing to record
    return Verdict("ranks", WHAT, not row["other_tokens"] and is_faster, f"{found}, {times}", WANTED)


def too_few(count: int) -> Verdict:
    return Verdict("ranks", WHAT, False, f"{count} GPU here", WANTED, f"needs {RANKS} GPUs")


def measure(device: str, folder: Path) -> dict[str, Any]:
    config = DecodeWorkerConfig(
        model=str(make_tiny_model(folder / "ranks-model")), device=device, dtype="float32", quantization="none",
        tensor_parallel_size=RANKS, num_blocks=ROWS, block_size=BLOCK_SIZE, max_num_seqs=2 * ROWS, threads=RANKS,
    )  # fmt: skip
    on_cpu = patch(
        "common.engine.ranks.loading.records_steps", lambda config, device: True
    )  # a replay runs the step again
    with on_cpu if device == "cpu" else nullcontext():
        loaded = load_ranked(resolve_model(config.model), config)
    runner = loaded.runner
    assert isinstance(runner, GraphRunner) and loaded.others is not None
    first = [(7 * i + 3) % loaded.vocab_size for i in range(ROWS)]
    plain, plain_s = plain_tokens(runner, first)
    recorded, recorded_s = recorded_tokens(runner, first, loaded.vocab_size)
    other = sum(mine != theirs for mine, theirs in zip(recorded, plain, strict=True))
    loaded.others.close()
    times = {"plain_ms": 1000 * plain_s / NUM_STEPS, "recorded_ms": 1000 * recorded_s / NUM_STEPS}
    return {"ranks": RANKS, "device": device, "rows": ROWS, "tokens": len(plain), "other_tokens": other, **times}


def prefill(runner: GraphRunner) -> None:
    """KV for every row; then each kind of step has run once."""
    tokens = [[(5 * i + j) % 200 for j in range(PROMPT)] for i in range(ROWS)]
    runner.forward([SequenceChunk(tokens[i], 0, (i,)) for i in range(ROWS)])


def rows(tokens: Sequence[int], step: int) -> list[SequenceChunk]:
    return [SequenceChunk((token,), PROMPT + step, (i,)) for i, token in enumerate(tokens)]


def plain_tokens(runner: GraphRunner, first: Sequence[int]) -> tuple[list[int], float]:
    """Of steps kernel by kernel, each of which begins with the tokens of the one before on the host; and the time."""
    prefill(runner)
    found, tokens = list[int](), list(first)
    began = time.perf_counter()
    for step in range(NUM_STEPS):
        tokens = runner.run(runner.prepare(rows(tokens, step))).argmax(-1).tolist()
        found += tokens
    return found, time.perf_counter() - began


def recorded_tokens(runner: GraphRunner, first: Sequence[int], vocab_size: int) -> tuple[list[int], float]:
    """Of recorded steps, each launched before the tokens of the one before are read; and the time."""
    prefill(runner)
    launcher = StepLauncher(runner, Sampler(vocab_size))
    found, before = list[int](), list[GraphStep]()
    began = time.perf_counter()
    for step in range(NUM_STEPS):
        launched = launcher.launch(rows(first, step), range(ROWS) if step else [FROM_HOST] * ROWS)
        launched.sample({})
        if before:
            found += [token.token_id for token in before.pop().read()]
        before.append(launched)
    found += [token.token_id for token in before.pop().read()]
    return found, time.perf_counter() - began


def main(device: str, folder: str) -> int:
    try:
        with torch.inference_mode():
            print(json.dumps(measure(device, Path(folder))))
    except Exception:  # raised, it would have the interpreter wait for graphs and communicator
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    end_process(main(*sys.argv[1:3]))
