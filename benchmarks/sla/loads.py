"""Loads on which policies are compared: requests, goals, and the pools that serve them."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceRow, read_trace
from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.sla.step import Settings
from common.latency.step_model import StepShape

STEP_TOKENS, MOST_ROWS = 2048, 128
"""Prompt tokens of a step, at most; sequences of a batch where a load says nothing else."""
PLANNED_SHARE = 0.8
"""Of the goal for a token, that a step is planned to take at first (`common/engine/sequences/step_budget.py`)."""
CACHE_TOKENS = 400_000
"""What the KV cache of a worker holds."""
SLOW: Final = 2.0
"""How many times as long a slow worker's steps take."""
PREFILL: Final = StepCoefficients(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9)
DECODE: Final = StepCoefficients(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9, row_s=3e-5, context_s=2.5e-8)
"""About those of an 8B model on one large GPU, as in `benchmarks.planner`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to slice, goals in milliseconds, and workers. A prompt has at most `most_prompt` tokens.

    `num_slow` of the prefill workers are slow. A run has `times` as many requests as others: those of large pools end
    too soon otherwise. Blocks of the KV cache have `block_size` tokens.
    """

    name: str
    rows: Sequence[TraceRow]
    ttft_ms: float = 500.0
    tpot_ms: float = 25.0
    most_prompt: int = 30_000
    num_prefill: int = 3
    num_decode: int = 3
    num_slow: int = 0
    times: float = 1.0
    block_size: int = 64
    most_rows: int = MOST_ROWS
    jitter_s: float = 0.0

    def slice(self, number: int, num_requests: int) -> Sequence[TraceRow]:
        """So many requests; numbers name slices that do not overlap while the load is long enough."""
        begin = number * num_requests % max(1, len(self.rows) - num_requests)
        rows = self.rows[begin : begin + num_requests]
        return [
            TraceRow(
                row.arrival_s - rows[0].arrival_s,
                min(row.input_len, self.most_prompt),
                max(1, row.output_len),
                row.block_ids[: self.most_prompt // MOONCAKE_BLOCK_TOKENS],
            )
            for row in rows
        ]


def log_normal(
    name: str, seed: int, prompt: tuple[float, float], output: tuple[float, float], num: int = 6000, **more: Any
) -> Load:
    """Independent requests, one a second on average; medians and sigmas of their lengths, and fields of the load."""
    chance, at = random.Random(f"{seed}/{name}"), 0.0
    rows: list[TraceRow] = []
    for _ in range(num):
        at += chance.expovariate(1.0)
        lengths = (round(median * chance.lognormvariate(0.0, sigma)) for median, sigma in (prompt, output))
        num_prompt, num_output = lengths
        rows.append(TraceRow(at, min(8000, max(16, num_prompt)), min(1500, max(4, num_output))))
    return Load(name, rows, **more)


def conversations(seed: int, num: int = 3000) -> Load:
    """Turns of conversations, each of which repeats the ones before it: blocks of 512 tokens as in Mooncake's trace."""
    chance, at, next_block = random.Random(f"{seed}/turns"), 0.0, 0
    rows: list[TraceRow] = []
    open_ones: list[tuple[int, ...]] = []
    while len(rows) < num:
        at += chance.expovariate(1.0)
        known: tuple[int, ...] = ()
        if open_ones and chance.random() < 0.7:
            known = open_ones.pop(chance.randrange(len(open_ones)))
        added = chance.randint(1, 6)
        blocks = (*known, *range(next_block, next_block + added))
        next_block += added
        rows.append(TraceRow(at, 512 * len(blocks), min(800, max(8, round(chance.lognormvariate(5.0, 0.6)))), blocks))
        open_ones = [*open_ones, blocks][-60:] if len(blocks) < 40 else open_ones
    name = "turns of conversations, synthetic"
    return Load(name, rows, ttft_ms=1000.0, tpot_ms=40.0, num_prefill=4, num_decode=4, block_size=512, times=0.4)


def loads(settings: Settings) -> Iterator[Load]:
    """Raises TraceError for a file that cannot be read."""
    seed = settings.seed
    code = log_normal("code, synthetic", seed, (1600, 0.7), (25, 0.8), times=0.4)
    if settings.traces is None:
        yield log_normal(
            "conversation, synthetic", seed, (900, 0.8), (180, 0.6), num_prefill=2, num_decode=2, times=0.6
        )
        yield code
    else:
        names = ("azure2023_conv.csv.gz", "azure2023_code.csv.gz", "mooncake_conversation.jsonl.gz")
        conversation, of_code, mooncake = (read_trace(settings.traces / name, begin=settings.begin) for name in names)
        yield Load("Azure conversation, 2P2D", conversation, num_prefill=2, num_decode=2, times=0.6)
        yield Load("Azure code", of_code, times=0.5)
        yield Load("Mooncake", mooncake, ttft_ms=5000.0, tpot_ms=40.0, block_size=512, jitter_s=3.0, times=0.3)
    yield conversations(seed)
    yield replace(code, name="code, synthetic, 8P8D", num_prefill=8, num_decode=8, times=0.6)
    yield replace(code, name="code, synthetic, a slow prefill worker", num_slow=1)
    at_ease: dict[str, Any] = {"ttft_ms": 600.0, "tpot_ms": 100.0, "times": 0.4}
    yield log_normal("long prompts, tokens in no hurry", seed, (4000, 0.3), (30, 0.5), **at_ease)
    few: dict[str, Any] = {"ttft_ms": 300.0, "num_prefill": 1, "num_decode": 5, "most_rows": 24, "times": 0.5}
    yield log_normal("short prompts, long answers, 1P5D", seed, (120, 0.5), (300, 0.4), **few)


def uncached_lens(rows: Sequence[TraceRow]) -> list[int]:
    """Prompt tokens of each request that a cache of all requests before it would not hold, the last one at least."""
    seen: set[int] = set()
    lens = []
    for row in rows:
        num_hits = next((place for place, one in enumerate(row.block_ids) if one not in seen), len(row.block_ids))
        seen.update(row.block_ids)
        lens.append(max(1, row.input_len - MOONCAKE_BLOCK_TOKENS * num_hits))
    return lens


def prompts_s(rows: Sequence[TraceRow]) -> list[float]:
    """Seconds of a prefill worker that each prompt takes at least, whatever is cached by then."""
    model = PREFILL.model()
    return [
        model.token_s * num_new
        + model.pair_s * (row.input_len**2 - (row.input_len - num_new) ** 2)
        + model.fixed_s * num_new / STEP_TOKENS
        for row, num_new in zip(rows, uncached_lens(rows), strict=True)
    ]


def rate_served(rows: Sequence[TraceRow], load: Load) -> float:
    """Requests a second that the workers can serve about within the goal for a token, each of them all of the time.

    Decode workers compute prompts in the time that their answers leave of a step. Where answers fill their batches,
    that is the limit.
    """
    prompt_s = statistics.fmean(prompts_s(rows))
    context = statistics.fmean(row.input_len + row.output_len / 2 for row in rows)
    num_tokens = statistics.fmean(row.output_len for row in rows)
    num_prefill = load.num_prefill - load.num_slow * (1 - 1 / SLOW)
    row_s, step_s = DECODE.row_s + DECODE.context_s * context, PLANNED_SHARE * load.tpot_ms / 1000
    left = max(0.0, 1 - DECODE.fixed_s / step_s)  # of a decode worker's time
    by_time = (num_prefill + load.num_decode * left) / (prompt_s + num_tokens * row_s)
    decode = DECODE.model()
    num_rows = min(load.most_rows, decode.most_rows(context, step_s), CACHE_TOKENS / context)
    full_s = decode.seconds(StepShape.of_rows(round(num_rows), round(num_rows * context)))
    return min(by_time, load.num_decode * num_rows / (full_s * num_tokens))


def write_trace(file: Path, rows: Sequence[TraceRow]) -> None:
    """Write requests in Mooncake's format."""
    lines = (
        {
            "timestamp": row.arrival_s * 1000,
            "input_length": row.input_len,
            "output_length": row.output_len,
            "hash_ids": row.block_ids,
        }
        for row in rows
    )
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
