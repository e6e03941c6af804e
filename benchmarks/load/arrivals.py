"""Arrival times of independent clients at a rate that changes over time: steps, ramps and bursts."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = r"[0-9]*\.?[0-9]+"
STEPS = rf"{NUMBER}(-{NUMBER})?x{NUMBER}(,{NUMBER}(-{NUMBER})?x{NUMBER})*"
RAMP = rf"{NUMBER}:{NUMBER}"
BURST = rf"{NUMBER}:{NUMBER}x{NUMBER}"


@dataclass(frozen=True, slots=True)
class Segment:
    """`seconds` in which the rate, in requests a second, changes evenly from `begin` to `end`."""

    begin: float
    end: float
    seconds: float

    @property
    def num_expected(self) -> float:
        """Requests that arrive on average."""
        return (self.begin + self.end) / 2 * self.seconds

    def rate_at(self, at: float) -> float:
        return self.begin + (self.end - self.begin) * at / self.seconds

    def time_of(self, num: float) -> float:
        """Seconds after which `num` requests are expected; `num` is above 0 and at most `num_expected`."""
        growth = (self.end - self.begin) / self.seconds
        root = math.sqrt(max(0.0, self.begin**2 + 2.0 * growth * num))
        return min(self.seconds, 2.0 * num / (self.begin + root))


@dataclass(frozen=True, slots=True)
class RateProfile:
    """A rate over time. Nothing arrives after the last segment."""

    segments: tuple[Segment, ...]

    @classmethod
    def steps(cls, text: str) -> RateProfile:
        """`2x30,8x60,8-2x20`: 30 s at 2 requests a second, 60 s at 8, 20 s from 8 down to 2. Raises ValueError."""
        if not re.fullmatch(STEPS, text):
            raise ValueError(f"{text!r} is not RATExSECONDS,...")
        segments = []
        for part in text.split(","):
            rates, _, seconds = part.partition("x")
            begin, _, end = rates.partition("-")
            segments.append(Segment(float(begin), float(end or begin), float(seconds)))
        return cls._checked(segments)

    @classmethod
    def ramp(cls, text: str, seconds: float) -> RateProfile:
        """`2:8`: from 2 requests a second evenly to 8 in `seconds`. Raises ValueError."""
        if not re.fullmatch(RAMP, text):
            raise ValueError(f"{text!r} is not RATE:RATE")
        begin, _, end = text.partition(":")
        return cls._checked([Segment(float(begin), float(end), seconds)])

    @classmethod
    def burst(cls, text: str, seconds: float) -> RateProfile:
        """`2:20x10`: 2 requests a second, and 20 for the 10 s in the middle of `seconds`. Raises ValueError."""
        if not re.fullmatch(BURST, text):
            raise ValueError(f"{text!r} is not RATE:RATExSECONDS")
        base, _, rest = text.partition(":")
        peak, _, peak_s = rest.partition("x")
        if float(peak_s) >= seconds:
            raise ValueError(f"a burst of {peak_s} s does not fit into {seconds:g} s")
        calm = Segment(float(base), float(base), (seconds - float(peak_s)) / 2)
        return cls._checked([calm, Segment(float(peak), float(peak), float(peak_s)), calm])

    @classmethod
    def _checked(cls, segments: list[Segment]) -> RateProfile:
        if any(segment.seconds <= 0.0 for segment in segments):
            raise ValueError("each part must last longer than 0 s")
        if not any(segment.num_expected for segment in segments):
            raise ValueError("at least one rate must be above 0")
        return cls(tuple(segments))

    @property
    def seconds(self) -> float:
        return math.fsum(segment.seconds for segment in self.segments)

    @property
    def num_expected(self) -> float:
        """Requests that arrive on average."""
        return math.fsum(segment.num_expected for segment in self.segments)

    def rate_at(self, at: float) -> float:
        """Requests a second at `at` seconds; 0 outside of the profile."""
        for segment in self.segments:
            if 0.0 <= at < segment.seconds:
                return segment.rate_at(at)
            at -= segment.seconds
        return 0.0

    def arrivals(self, seed: int) -> Iterator[float]:
        """Times in seconds of a Poisson process with this rate, ascending.

        Gaps of a process with rate 1 are mapped through the inverse of the expected number of arrivals (Çinlar,
        "Introduction to Stochastic Processes", 1975).
        """
        source = random.Random(f"{seed}/profile")
        begun, before, due = 0.0, 0.0, source.expovariate(1.0)
        for segment in self.segments:
            while due - before <= segment.num_expected:
                yield begun + segment.time_of(due - before)
                due += source.expovariate(1.0)
            begun += segment.seconds
            before += segment.num_expected
