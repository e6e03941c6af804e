"""What `python -m benchmarks.reality` runs: clusters, and loads whose every request is fixed by the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRow, read_trace
from benchmarks.load.workload import LengthRange, Vocabulary, Workload, fit_rows
from benchmarks.paced.coefficients import StepCoefficients
from benchmarks.paced.model import Coefficients
from common.latency.step_model import StepShape

PACE: Final = Path(__file__).parent.parent / "data" / "reality.json"
"""Slow enough that a small machine's own time for messages and Python is a small part."""
STEP_TOKENS: Final = 512
MAX_MODEL_LEN: Final = 8192
NUM_BLOCKS: Final = 4096
"""Of each worker's KV cache."""
TTFT_MS, TPOT_MS = 1000.0, 50.0
"""Goals at pace 1."""
LEAST_OUTPUT: Final = 8
"""Tokens of an answer: of two or three, the time between tokens is where in a step their KV came."""
NUM_SAMPLED: Final = 2000
"""Requests of a trace that its rate is set by."""
PRINTABLE: Final = tuple(range(32, 127))
"""Token ids of prompts: of the paced model's byte tokenizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster. Its steps take `pace` times as long as the file says, and its goals are as much looser.

    So a large cluster gets no more requests a second than a small one, and fits on the same machine.
    """

    name: str
    prefill: int
    decode: int
    routers: int = 1
    pace: float = 1.0

    @property
    def ttft_ms(self) -> float:
        return TTFT_MS * self.pace

    @property
    def tpot_ms(self) -> float:
        return TPOT_MS * self.pace

    def coefficients(self) -> Coefficients:
        """The coefficients of the file PACE, slowed to this pace."""
        known = Coefficients.read(PACE)
        return Coefficients(
            _slower(known.prefill, self.pace), _slower(known.decode, self.pace), kv_bytes=known.kv_bytes
        )


CASES: Final = (Case("1P1D", 1, 1), Case("2P2D", 2, 2, pace=1.5), Case("8P8D", 8, 8, routers=2, pace=4.0))


@dataclass(frozen=True, slots=True)
class LoadKind:
    """Requests of a trace, or of random lengths. `used` is the share of the prefill pool's time that prompts take.

    Lengths are multiplied by `scale` and cut. Arrivals are moved by up to `jitter_s` seconds of the trace's time. Of a
    trace one in `stride` requests is taken: a few seconds of it as they are would be one burst.
    """

    name: str
    trace: str = ""
    scale: float = 1.0
    max_input_len: int = 2048
    max_output_len: int = 128
    jitter_s: float = 0.0
    stride: int = 1
    used: float = 0.6

    @property
    def id_tokens(self) -> int:
        """Prompt tokens that one block id of the trace stands for."""
        return round(MOONCAKE_BLOCK_TOKENS * self.scale)

    def rows(self, case: Case, seconds: float, traces: Path, seed: int, begin: float = 0.0) -> list[TraceRow]:
        """The requests that arrive within `seconds`; of a trace behind the share `begin` of it. Raises TraceError."""
        source = random.Random(f"{seed}/{self.name}")
        if self.trace:
            rows = read_trace(traces / self.trace, NUM_SAMPLED * self.stride, begin=begin)[:: self.stride]
            rows = [replace(row, arrival_s=row.arrival_s + source.uniform(0.0, self.jitter_s)) for row in rows]
            rows.sort(key=lambda row: row.arrival_s)
        else:
            rows = list(islice(_random_rows(source), NUM_SAMPLED))
        rows = fit_rows(rows, scale=self.scale, max_input_len=self.max_input_len, max_output_len=self.max_output_len)
        rows = [replace(row, output_len=max(LEAST_OUTPUT, row.output_len)) for row in rows]
        model, num_rows = case.coefficients().prefill.model(), len(rows)
        prompt_s = sum(model.steps_s(StepShape.of_prompt(0, row.input_len), STEP_TOKENS) for row in rows) / num_rows
        count = round(seconds * self.used * case.prefill / prompt_s)
        if not 0 < count < num_rows:
            raise TraceError(f"{self.name}: {seconds:g} s of {case.name} need {count} requests of 1 to {num_rows - 1}")
        faster = rows[count].arrival_s / seconds
        return [replace(row, arrival_s=row.arrival_s / faster) for row in rows[:count]]


LOADS: Final = (
    LoadKind("conversation", "azure2023_conv.csv.gz", stride=4),
    LoadKind("code", "azure2023_code.csv.gz", max_output_len=64, stride=4),
    LoadKind("mooncake", "mooncake_conversation.jsonl.gz", scale=1 / 8, jitter_s=3.0),
    LoadKind("synthetic"),
)


def workload_of(rows: Sequence[TraceRow], id_tokens: int, seed: int) -> Workload:
    """Prompts and lengths of the rows, for the load generator."""
    one = LengthRange(1, 1)
    return Workload(Vocabulary(PRINTABLE), one, one, seed=seed, rows=rows, block_tokens=id_tokens)


def write_trace(rows: Sequence[TraceRow], file: Path) -> Path:
    """Write the rows in Mooncake's form, from which a simulation reads the same requests."""
    lines = (
        json.dumps(
            {
                "timestamp": row.arrival_s * 1000,
                "input_length": row.input_len,
                "output_length": row.output_len,
                "hash_ids": row.block_ids,
            }
        )
        for row in rows
    )
    file.write_text("\n".join(lines) + "\n")
    return file


def _random_rows(source: random.Random) -> Iterator[TraceRow]:
    now = 0.0
    while True:
        yield TraceRow(now, source.randint(128, 1536), source.randint(16, 128), ())
        now += source.expovariate(1.0)


def _slower(coefficients: StepCoefficients, factor: float) -> StepCoefficients:
    costs = {name: factor * value for name, value in msgspec.structs.asdict(coefficients).items() if name[-2:] == "_s"}
    return msgspec.structs.replace(coefficients, **costs)
