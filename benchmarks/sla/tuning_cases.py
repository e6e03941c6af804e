"""Services whose load or workers change at one moment, for `tuning.py`: what comes, what happens, and with which flags.

The coefficients are about those of an 8B model in 16 bits on a GPU with 48 GB and 860 GB/s; none was measured.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.load.trace import TraceRow, read_trace
from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.simulator.world.scenario import Scenario, scenario_of
from common.latency.step_model import StepShape

WORK: Final = StepCoefficients(fixed_s=5e-3, floor_s=19e-3, token_s=8e-5, pair_s=2e-9, row_s=5e-5, context_s=1.6e-7)
NUM_BLOCKS, BLOCK_TOKENS = 13_000, 16
TTFT_MS, TPOT_MS, QUANTILE = 1000.0, 50.0, 0.95
EVENT_S, END_S = 20.0, 60.0
"""When something changes, and when the last request arrives."""
SLOWER = 2.0
LONGEST_PROMPT, LONGEST_ANSWER = 6000, 800
STEP_TOKENS = 2048
"""Of a prefill worker that computes no smaller steps."""
CHAT, DOCUMENTS, STORIES = ((900, 0.7), (180, 0.5)), ((2500, 0.4), (60, 0.5)), ((300, 0.6), (350, 0.4))
Lengths = tuple[tuple[float, float], tuple[float, float]]
"""Medians and sigmas of log-normal prompts and answers."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of some lengths at a share of the rate that all workers, in full health, can serve about.

    `lengths` are those of a trace, in its order, or drawn.
    """

    share: float
    lengths: Lengths | Sequence[tuple[int, int]]

    def draw(self, chance: random.Random, num: int) -> list[tuple[int, int]]:
        """Tokens of so many prompts and answers."""
        if not isinstance(self.lengths, tuple):
            first = chance.randrange(max(1, len(self.lengths) - num))
            found = list(self.lengths[first : first + num])
        else:
            found = [
                tuple(round(median * chance.lognormvariate(0.0, sigma)) for median, sigma in self.lengths)
                for _ in range(num)
            ]
        return [(min(LONGEST_PROMPT, max(16, p)), min(LONGEST_ANSWER, max(2, o))) for p, o in found]


@dataclass(frozen=True, slots=True)
class Setting:
    """Flags: prompt tokens of a step of a prefill worker, sequences of a decode worker, prompt tokens beside them, and
    up to which length decode workers compute prompts. 0: the flag's default."""

    step: int = 0
    rows: int = 0
    chunk: int = 0
    local: int = 64

    @property
    def name(self) -> str:
        return f"step {self.step}, rows {self.rows}, chunk {self.chunk}, local {self.local}"


@dataclass(frozen=True, slots=True)
class Case:
    """`before` and `after` the moment at which `slow` becomes slower, if there is one."""

    name: str
    before: Phase
    after: Phase
    num_prefill: int = 2
    num_decode: int = 2
    slow: str = ""

    def rows(self, seed: int) -> list[TraceRow]:
        """Requests that arrive at random, of one seed."""
        chance, found = random.Random(f"{seed}/{self.name}"), list[TraceRow]()
        for phase, begin_s, end_s in ((self.before, 0.0, EVENT_S), (self.after, EVENT_S, END_S)):
            rate = phase.share * self.capacity(phase)
            lengths = phase.draw(chance, 2 * math.ceil(rate * (end_s - begin_s)) + 20)
            at_s = begin_s
            for prompt, answer in lengths:
                if (at_s := at_s + chance.expovariate(rate)) >= end_s:
                    break
                found.append(TraceRow(at_s, prompt, answer))
        return found

    def capacity(self, phase: Phase) -> float:
        """Requests a second, about: of the slower pool, or of workers that do both."""
        lengths = phase.draw(random.Random("capacity"), 500)
        model = WORK.model()
        prompt_s = statistics.fmean(
            model.seconds(StepShape.of_prompt(0, prompt)) - WORK.fixed_s for prompt, _ in lengths
        )
        answer = statistics.fmean(answer for _, answer in lengths)
        context = sum(answer * (prompt + answer / 2) for prompt, answer in lengths) / (answer * len(lengths))
        goal_s = TPOT_MS / 1000
        in_step = model.most_rows(context, goal_s)
        in_memory = NUM_BLOCKS * BLOCK_TOKENS / (context + answer / 2)
        answer_s = answer * goal_s / min(in_step, in_memory)
        if self.num_prefill:
            return min(self.num_prefill / prompt_s, self.num_decode / answer_s)
        return self.num_decode / (prompt_s + answer_s)

    def settings(self) -> list[Setting]:
        """What the sweep tries."""
        if not self.num_prefill:
            return [Setting(0, rows, chunk) for rows, chunk in product((64, 160), (128, 256, 384, 512))]
        remote = [Setting(512, rows) for rows in (64, 96, 160)]
        return [*remote, Setting(STEP_TOKENS, 96), Setting(STEP_TOKENS, 160), Setting(512, 160, 384, 512)]

    def scenario(self, trace: Path, seed: int, setting: Setting, *, fixed: bool) -> Scenario:
        work = msgspec.to_builtins(WORK)
        pool = {"coefficients": work, "num_blocks": NUM_BLOCKS, "fixed": fixed}
        event = {"at_s": EVENT_S, "kind": "slow", "worker": self.slow, "factor": SLOWER}
        prefill = {"name": "prefill", "role": "prefill", "count": self.num_prefill, "max_step_tokens": setting.step}
        decode: dict[str, Any] = {"name": "decode", "role": "decode", "count": self.num_decode}
        decode |= {"max_num_seqs": setting.rows, "max_step_tokens": setting.chunk}
        return scenario_of(
            {
                "seed": seed,
                "fit": True,
                "goals": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS},
                "settings": {"local_prefill_threshold": setting.local},
                "load": {"trace": str(trace)},
                "pool": [prefill | pool, decode | pool],
                "event": [event] if self.slow else [],
            }
        )


def cases(traces: Path | None) -> list[Case]:
    """Raises TraceError for a file that cannot be read."""
    found = [
        Case("rate: 40 to 90 %", Phase(0.4, CHAT), Phase(0.9, CHAT)),
        Case("rate: 50 to 130 %", Phase(0.5, CHAT), Phase(1.3, CHAT)),
        Case("mix: documents to stories", Phase(0.8, DOCUMENTS), Phase(0.8, STORIES)),
        Case("mix: stories to documents", Phase(0.8, STORIES), Phase(0.8, DOCUMENTS)),
        Case("a prefill worker slows down", Phase(0.6, CHAT), Phase(0.6, CHAT), slow="prefill-0"),
        Case("a decode worker slows down", Phase(0.5, CHAT), Phase(0.5, CHAT), 3, 3, "decode-0"),
        Case("one pool, rate: 40 to 90 %", Phase(0.4, CHAT), Phase(0.9, CHAT), 0, 3),
        Case("one pool, a worker slows down", Phase(0.5, CHAT), Phase(0.5, CHAT), 0, 3, "decode-0"),
    ]
    if traces is not None:
        code, conversation = (_lengths(traces / f"azure2023_{name}.csv.gz") for name in ("code", "conv"))
        found += [
            Case("Azure: code to conversation", Phase(0.8, code), Phase(0.8, conversation)),
            Case("Azure: conversation to code", Phase(0.8, conversation), Phase(0.8, code)),
        ]
    return found


def _lengths(trace: Path) -> list[tuple[int, int]]:
    return [(row.input_len, row.output_len) for row in read_trace(trace)]
