"""The requests of a scenario's load, by arrival: a function of the scenario alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulator.scenario import LoadSpec, Scenario
from benchmarks.simulator.tokens import Content, CountedPrompt, CountedTokens
from benchmarks.trace import read_trace
from benchmarks.workload import LengthRange, fit_rows
from common.errors import ConfigError
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, and what becomes of it. Times are virtual, in seconds; NaN before they come.

    `outcome` is "ok", or the name of the error that ended it. `num_tokens` is what its client got.
    """

    number: int
    arrival_s: float
    output_len: int
    content: Content
    first_token_at: float = math.nan
    ended_at: float = math.nan
    num_tokens: int = 0
    num_cached: int = 0
    outcome: str = ""

    @property
    def request_id(self) -> str:
        return str(self.number)

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """NaN for answers of one token."""
        if self.num_tokens < 2:
            return math.nan
        return (self.ended_at - self.first_token_at) / (self.num_tokens - 1)

    def meets(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether it met both goals; a goal of 0 is none."""
        if self.outcome != "ok" or (ttft_ms and self.ttft_s * 1000 > ttft_ms):
            return False
        return not (tpot_ms and self.tpot_s * 1000 > tpot_ms)

    def ask(self, max_tokens: int, ttft_s: float, deadline_s: float, tpot_s: float = 0.0) -> GenerationRequest:
        """The request as a router gets it."""
        return GenerationRequest(
            request_id=self.request_id,
            prompt_token_ids=CountedTokens(self.content.num_prompt_tokens),
            params=SamplingParams(max_tokens=max(max_tokens, self.output_len)),
            deadline_s=deadline_s,
            prompt=CountedPrompt(self.content),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )


def requests_of(scenario: Scenario) -> list[SimulatedRequest]:
    """Raises TraceError for a trace that cannot be read, ConfigError for lengths that are none."""
    load, longest = scenario.load, scenario.model.max_model_len
    found = list(_of_trace(load, scenario) if load.trace else _at_random(load, scenario))
    for request in found:
        if request.content.num_prompt_tokens + request.output_len > longest:
            length = request.content.num_prompt_tokens + request.output_len
            raise ConfigError("model.max_model_len", longest, f"at least {length}, which one request has")
    return found


def _of_trace(load: LoadSpec, scenario: Scenario) -> Iterator[SimulatedRequest]:
    rows = fit_rows(read_trace(Path(load.trace)), max_input_len=load.max_input_len, max_output_len=load.max_output_len)
    source = random.Random(f"{scenario.seed}/jitter")
    arrivals = [
        (row.arrival_s / load.speedup + source.uniform(0.0, load.jitter_s), copy, row)
        for copy in range(load.copies)
        for row in rows
    ]
    arrivals.sort(key=lambda arrival: arrival[:2])
    for number, (arrival_s, copy, row) in enumerate(arrivals):
        if scenario.duration_s and arrival_s > scenario.duration_s:
            return
        content = Content(number, row.input_len, copy, row.block_ids, load.id_tokens)
        yield SimulatedRequest(number, arrival_s, max(1, row.output_len), content)


def _at_random(load: LoadSpec, scenario: Scenario) -> Iterator[SimulatedRequest]:
    lengths = []
    for name in ("input_len", "output_len"):
        try:
            lengths.append(LengthRange.parse(getattr(load, name)))
        except ValueError as error:
            raise ConfigError(f"load.{name}", getattr(load, name), str(error)) from error
    source = random.Random(f"{scenario.seed}/requests")
    shared = load.shared_prefix_len
    for number, arrival_s in enumerate(_poisson(load, scenario)):
        input_len, output_len = (length.draw(source) for length in lengths)
        content = Content(number, input_len, ids=(0,) if shared else (), id_tokens=max(1, shared))
        yield SimulatedRequest(number, arrival_s, output_len, content)


def _poisson(load: LoadSpec, scenario: Scenario) -> Iterator[float]:
    """Arrival times of a Poisson process whose rate changes in steps."""
    source = random.Random(f"{scenario.seed}/arrivals")
    steps = sorted(load.rates) or [(0.0, load.rate)]
    ends = [*(at_s for at_s, _ in steps[1:]), scenario.duration_s]
    for (begin_s, rate), end_s in zip(steps, ends, strict=True):
        now = begin_s
        while rate > 0.0 and (now := now + source.expovariate(rate)) < min(end_s, scenario.duration_s):
            yield now
