"""Requests of a load: prompts and output lengths as a function of (seed, index), and arrival times."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.load.trace import MOONCAKE_BLOCK_TOKENS, TraceRow

Prompt = list[int] | str

# Short, common words: one token each in most vocabularies.
_WORDS = """
the of and to in is was for that on as with by he at from his it an were are which this also be had has first one
their its new after but who not they her she two been other when time all made only more can some over into such no
most may city then out state year day up would part world work life name high long while house line place water
night river hand book light road paper stone green white black small large young open early late north south east
west king queen car train ship plane door wall floor tree field snow rain wind fire earth
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A length in tokens, uniform between two bounds, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """`128` or `64-512`. Raises ValueError."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is neither a number nor a range a-b")
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if not 1 <= low <= high:
            raise ValueError(f"{text!r} must be at least 1 and not decrease")
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Material for prompts: token ids, which give exact lengths, or words, which give approximate ones."""

    token_ids: tuple[int, ...] = ()
    words: tuple[str, ...] = WORDS

    def draw(self, source: random.Random, length: int) -> list[int] | list[str]:
        return source.choices(self.token_ids, k=length) if self.token_ids else source.choices(self.words, k=length)

    @staticmethod
    def join(units: Sequence[int | str]) -> Prompt:
        if units and isinstance(units[0], str):
            return " ".join(str(unit) for unit in units)
        return [int(unit) for unit in units]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request to send. `input_len` and `output_len` are in tokens (in words when the prompt is text)."""

    index: int
    prompt: Prompt
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Workload:
    """Requests by index. The same (seed, index) is always the same request; two indexes share no accidental prefix.

    With `rows`, lengths and shared prefixes come from a trace (its rows are cycled through); else from the two ranges
    and `shared_prefix_len`, the number of leading tokens that all prompts have in common (part of their length).
    """

    vocabulary: Vocabulary
    input_len: LengthRange
    output_len: LengthRange
    seed: int = 0
    shared_prefix_len: int = 0
    rows: Sequence[TraceRow] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def request(self, index: int) -> RequestPlan:
        source = random.Random(f"{self.seed}/request/{index}")
        if not self.rows:
            length = self.input_len.draw(source)
            shared = self._block("shared", min(self.shared_prefix_len, length))
            units = [*shared, *self.vocabulary.draw(source, length - len(shared))]
            return RequestPlan(index, self.vocabulary.join(units), length, self.output_len.draw(source))
        cycle, position = divmod(index, len(self.rows))
        row = self.rows[position]
        units = [unit for block in row.block_ids for unit in self._block(f"{cycle}/{block}", self.block_tokens)]
        units = units[: row.input_len]
        units += self.vocabulary.draw(source, row.input_len - len(units))
        return RequestPlan(index, self.vocabulary.join(units), row.input_len, max(1, row.output_len))

    def _block(self, name: str, length: int) -> list[int] | list[str]:
        return self.vocabulary.draw(random.Random(f"{self.seed}/block/{name}"), length)


def fit_rows(
    rows: Sequence[TraceRow], *, scale: float = 1.0, max_input_len: int = 0, max_output_len: int = 0
) -> list[TraceRow]:
    """Fit a trace to a small model: lengths times `scale`, then cut to the bounds (0: none).

    Prefix sharing survives when the workload's `block_tokens` is scaled alike.
    """

    def fit(length: int, bound: int, least: int) -> int:
        scaled = max(least, round(length * scale))
        return min(scaled, bound) if bound else scaled

    return [
        replace(row, input_len=fit(row.input_len, max_input_len, 1), output_len=fit(row.output_len, max_output_len, 1))
        for row in rows
    ]


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds, `rate` a second on average; all at once when `rate` is infinite."""
    source = random.Random(f"{seed}/arrivals")
    now = 0.0
    while True:
        yield now
        if not math.isinf(rate):
            now += source.expovariate(rate)


def trace_arrivals(rows: Sequence[TraceRow], *, speedup: float = 1.0, jitter_s: float = 0.0, seed: int) -> list[float]:
    """The rows' arrival times, `speedup` times as fast, each moved by up to `jitter_s` seconds; in order."""
    source = random.Random(f"{seed}/jitter")
    return sorted(row.arrival_s / speedup + source.uniform(0.0, jitter_s) for row in rows)
