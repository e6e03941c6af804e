"""The requests of a scenario's load, by arrival: a function of the scenario alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.trace import read_trace
from benchmarks.load.workload import LengthRange, fit_rows
from benchmarks.simulator.world.scenario import LoadPart, LoadSpec, Scenario
from benchmarks.simulator.world.tokens import Content, CountedPrompt, CountedTokens
from common.errors import ConfigError
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, and what becomes of it. Times are virtual, in seconds; NaN before they come.

    `outcome` is "ok", or the name of the error that ended it. `num_tokens` is what its client got. `part` is the place
    of its part in the load.
    """

    number: int
    arrival_s: float
    output_len: int
    content: Content
    part: int = 0
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
    if load.trace:
        found = list(_of_trace(load, scenario))
    else:
        found = list(_of_parts(load, scenario) if load.parts else _at_random(load, scenario))
    for request in found:
        if request.content.num_prompt_tokens + request.output_len > longest:
            length = request.content.num_prompt_tokens + request.output_len
            raise ConfigError("model.max_model_len", longest, f"at least {length}, the length of the longest request")
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
    lengths = _lengths_of(load, "load")
    source = random.Random(f"{scenario.seed}/requests")
    steps = sorted(load.rates) or [(0.0, load.rate)]
    ends = [*(at_s for at_s, _ in steps[1:]), scenario.duration_s]
    windows = ((rate, begin_s, end_s) for (begin_s, rate), end_s in zip(steps, ends, strict=True))
    arrivals = _poisson(windows, scenario.duration_s, random.Random(f"{scenario.seed}/arrivals"))
    for number, arrival_s in enumerate(arrivals):
        input_len, output_len = (length.draw(source) for length in lengths)
        yield SimulatedRequest(number, arrival_s, output_len, _content(number, input_len, load.shared_prefix_len))


def _of_parts(load: LoadSpec, scenario: Scenario) -> Iterator[SimulatedRequest]:
    """The requests of all parts by arrival. Each part has its own chance, so that no other part changes it."""
    period_s = load.period_s or scenario.duration_s
    drawn: list[tuple[float, int, int, int]] = []
    for place, part in enumerate(load.parts):
        lengths = _lengths_of(part, f"load.parts[{place}]")
        source = random.Random(f"{scenario.seed}/requests/{place}")
        begins = (number * period_s for number in range(math.ceil(scenario.duration_s / period_s)))
        windows = ((part.rate, at_s + part.begin_s, at_s + (part.end_s or period_s)) for at_s in begins)
        arrivals = _poisson(windows, scenario.duration_s, random.Random(f"{scenario.seed}/arrivals/{place}"))
        for arrival_s in arrivals:
            input_len, output_len = (length.draw(source) for length in lengths)
            drawn.append((arrival_s, place, input_len, output_len))
    drawn.sort(key=lambda one: one[:2])
    for number, (arrival_s, place, input_len, output_len) in enumerate(drawn):
        content = _content(number, input_len, load.parts[place].shared_prefix_len, place)
        yield SimulatedRequest(number, arrival_s, output_len, content, place)


def _content(number: int, input_len: int, shared: int, prefix: int = 0) -> Content:
    """A prompt whose first `shared` tokens are those of the `prefix`."""
    return Content(number, input_len, ids=(prefix,) if shared else (), id_tokens=max(1, shared))


def _lengths_of(part: LoadSpec | LoadPart, where: str) -> tuple[LengthRange, LengthRange]:
    """The ranges of lengths of prompts and of answers."""
    found = []
    for name in ("input_len", "output_len"):
        try:
            found.append(LengthRange.parse(getattr(part, name)))
        except ValueError as error:
            allowed = f"a length such as 128, or a range such as 64-512 ({error})"
            raise ConfigError(f"{where}.{name}", getattr(part, name), allowed) from error
    return found[0], found[1]


def _poisson(
    windows: Iterable[tuple[float, float, float]], duration_s: float, source: random.Random
) -> Iterator[float]:
    """Arrival times of a Poisson process that has a rate from one second to another of each window."""
    for rate, begin_s, end_s in windows:
        now = begin_s
        while rate > 0.0 and (now := now + source.expovariate(rate)) < min(end_s, duration_s):
            yield now
