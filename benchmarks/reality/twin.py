"""The simulated side: the scenario of a cluster, with what was measured of it at idle."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.load.trace import TraceRow
from benchmarks.paced.coefficients import StepCoefficients
from benchmarks.reality.loads import MAX_MODEL_LEN, NUM_BLOCKS, STEP_TOKENS, Case, write_trace
from benchmarks.reality.numbers import Fate
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.scenario import Goals, LoadSpec, ModelSpec, PoolSpec, Scenario

ALONE_LENGTHS: Final = (300, 900, 2000)
"""Prompts that calibrate: of one step to four."""
ALONE_ROUNDS: Final = 2
ALONE_OUTPUTS: Final = (2, 12)
"""Answers that calibrate: the second token waits for the transfer, those behind it for steps alone."""
ALONE_GAP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Twin:
    """What a simulation of a case is made from. Seconds; `source` says where the coefficients come from."""

    case: Case
    source: str
    prefill: StepCoefficients
    decode: StepCoefficients
    kv_bytes: int
    message_s: float
    link_s: float = 0.0
    ingress_s: float = 0.0
    ingress_token_s: float = 0.0
    noise: float = 0.0

    def scenario(self, trace: Path, *, policy: str, seed: int, id_tokens: int = 512) -> Scenario:
        """The case under the load of a trace file."""
        case = self.case
        pools = (
            PoolSpec(
                name="prefill",
                role="prefill",
                count=case.prefill,
                coefficients=self.prefill,
                max_step_tokens=STEP_TOKENS,
                num_blocks=NUM_BLOCKS,
            ),
            PoolSpec(name="decode", role="decode", count=case.decode, coefficients=self.decode, num_blocks=NUM_BLOCKS),
        )
        return Scenario(
            pool=pools,
            load=LoadSpec(trace=str(trace), id_tokens=id_tokens),
            model=ModelSpec(kv_bytes_per_token=self.kv_bytes, max_model_len=MAX_MODEL_LEN),
            goals=Goals(ttft_ms=self.case.ttft_ms, tpot_ms=self.case.tpot_ms),
            policy=policy,
            routers=self.case.routers,
            seed=seed,
            noise=self.noise,
            message_s=self.message_s,
            link_s=self.link_s,
            warm=True,
            ingress_s=self.ingress_s,
            ingress_token_s=self.ingress_token_s,
        )

    def simulate(
        self, rows: Sequence[TraceRow], folder: Path, *, policy: str, seed: int, id_tokens: int = 512
    ) -> list[Fate]:
        """What becomes of the rows' requests."""
        trace = write_trace(rows, folder / "trace.jsonl")
        run = Simulation(self.scenario(trace, policy=policy, seed=seed, id_tokens=id_tokens)).run()
        return [Fate.of_simulated(request) for request in run.requests]

    def calibrated(self, real: Sequence[Fate], folder: Path, *, steps: bool) -> Twin:
        """This twin, with the times that a simulation of `alone_rows` lacks beside what the real cluster needed.

        With `steps` the coefficients are corrected by it, which do not know what an engine needs beside the model:
        those of decode steps by the time between two tokens, those of prompts by what each token more takes longer.
        """
        twin = self
        if steps:
            more_s = _step_s(real) - _step_s(self._alone(folder))
            slower = msgspec.structs.replace(self.decode, fixed_s=max(0.0, self.decode.fixed_s + more_s))
            twin = replace(self, decode=slower)
        found = twin._alone(folder)
        link_s = statistics.median(real[few].tpot_s - found[few].tpot_s for few, _ in _pairs())
        used = [number for pair in _pairs() for number in pair]
        lacking_s = [real[number].ttft_s - found[number].ttft_s for number in used]
        line = statistics.linear_regression([alone_rows()[number].input_len for number in used], lacking_s)
        slope_s, begin_s = max(0.0, line.slope), line.intercept
        if begin_s < 0.0 or line.slope < 0.0:
            slope_s, begin_s = 0.0, statistics.fmean(lacking_s)
        twin = replace(twin, link_s=max(0.0, link_s), ingress_s=max(0.0, begin_s))
        if not steps:
            return replace(twin, ingress_token_s=slope_s)
        return replace(twin, prefill=msgspec.structs.replace(self.prefill, token_s=self.prefill.token_s + slope_s))

    def _alone(self, folder: Path) -> list[Fate]:
        return replace(self, noise=0.0).simulate(alone_rows(), folder, policy="diptych", seed=0)


def alone_rows() -> list[TraceRow]:
    """Requests that are sent one after the other. The first two are not used: workers and routers just met."""
    lengths = [(length, num_output) for length in ALONE_LENGTHS for num_output in ALONE_OUTPUTS]
    lengths = [*lengths[:2], *ALONE_ROUNDS * lengths]
    return [TraceRow(number * ALONE_GAP_S, *length) for number, length in enumerate(lengths)]


def _pairs() -> list[tuple[int, int]]:
    """Places among `alone_rows` of a short and a long answer to prompts of one length."""
    return [(number, number + 1) for number in range(2, len(alone_rows()), len(ALONE_OUTPUTS))]


def _step_s(fates: Sequence[Fate]) -> float:
    """The time between two tokens behind the second one."""
    more = max(ALONE_OUTPUTS) - min(ALONE_OUTPUTS)
    spans = ((_span_s(fates[many]) - _span_s(fates[few])) / more for few, many in _pairs())
    return statistics.median(spans)


def _span_s(fate: Fate) -> float:
    """From an answer's first token to its last."""
    return (fate.num_tokens - 1) * fate.tpot_s
