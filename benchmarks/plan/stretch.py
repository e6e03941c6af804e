"""How much of a trace is planned for: an hour of a busy service takes a minute to simulate, dozens of times. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from benchmarks.plan.candidate import Candidate, base_flags, scenario
from benchmarks.plan.spec import PlanSpec
from benchmarks.simulator.world.load import requests_of

TRACE_REQUESTS = 1200
"""Without a duration a trace is planned for up to so many requests: twice those of a load at a rate, because at its
begin nothing is cached."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The load to plan for, and a line on what it leaves out; "" when it is everything."""

    spec: PlanSpec
    note: str = ""

    @classmethod
    def of(cls, spec: PlanSpec) -> Stretch:
        """The beginning of a trace, as far as its duration says. Raises ConfigError and TraceError."""
        if not spec.load.trace:
            return cls(spec)
        whole = msgspec.structs.replace(spec, duration_s=0.0)
        lone = scenario(whole, Candidate(0, 1, base_flags(spec)), spec.seed, load_factor=1.0, goals=spec.goals)
        arrivals = [request.arrival_s for request in requests_of(lone)]
        if spec.duration_s >= arrivals[-1] or (not spec.duration_s and len(arrivals) <= TRACE_REQUESTS):
            return cls(whole)
        if spec.duration_s:
            return cls(spec)
        seconds, last_s = arrivals[TRACE_REQUESTS - 1], arrivals[-1]
        note = (
            f"Planned for the trace's first {seconds:,.0f} s, with {TRACE_REQUESTS / seconds:.3g} requests/s; all of it"
            f" has {len(arrivals) / last_s:.3g}. --duration-s {math.ceil(last_s)} plans for all of it."
        )
        return cls(msgspec.structs.replace(spec, duration_s=seconds), note)
