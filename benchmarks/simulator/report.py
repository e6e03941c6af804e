"""What a simulation found, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.load.report import print_table
from benchmarks.load.summary import Distribution
from benchmarks.simulator.conservation import Conserved
from benchmarks.simulator.simulation import Run
from common.errors import Overloaded

COLUMNS = (
    "policy",
    *(f"{name} {quantile}" for name in ("TTFT", "TPOT") for quantile in ("p50", "p90", "p99")),
    "goodput /s",
    "met goals",
    "refused",
    "failed",
    "worker-s",
)


@dataclass(frozen=True, slots=True)
class Findings:
    """A run in numbers. `goodput` is requests a second that met both goals; `seconds` and rates are in virtual time.

    Refused requests were not admitted, or shed in an overload; failed ones ended with another error. `num_by_part` has
    the requests of each part of the load, `good_by_part` the share of them that met both goals.
    """

    name: str
    policy: str
    num_requests: int
    num_ok: int
    num_good: int
    num_refused: int
    num_failed: int
    failures: dict[str, int]
    seconds: float
    goodput: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    output_tokens_per_s: float
    cached_share: float
    worker_seconds: float
    choices: dict[str, int]
    retries: dict[str, int]
    handovers: dict[str, int]
    num_role_changes: int
    num_by_part: tuple[int, ...]
    good_by_part: tuple[float, ...]
    num_events: int
    conserved: Conserved

    @classmethod
    def of(cls, run: Run) -> Findings:
        goals, requests = run.scenario.goals, run.requests
        served = [request for request in requests if request.outcome == "ok"]
        good = [request for request in served if request.meets(goals.ttft_ms, goals.tpot_ms)]
        num_of, num_good_of = (Counter(request.part for request in some) for some in (requests, good))
        failures = Counter(request.outcome for request in requests if request.outcome != "ok")
        num_refused = failures[Overloaded.__name__]
        num_prompt = sum(request.content.num_prompt_tokens for request in served)
        return cls(
            name=run.scenario.name,
            policy=run.scenario.policy,
            num_requests=len(requests),
            num_ok=len(served),
            num_good=len(good),
            num_refused=num_refused,
            num_failed=failures.total() - num_refused,
            failures=dict(failures),
            seconds=run.seconds,
            goodput=len(good) / run.seconds,
            ttft_ms=Distribution.of_seconds(request.ttft_s for request in served),
            tpot_ms=Distribution.of_seconds(request.tpot_s for request in served),
            output_tokens_per_s=sum(request.num_tokens for request in served) / run.seconds,
            cached_share=sum(request.num_cached for request in served) / max(1, num_prompt),
            worker_seconds=run.worker_seconds,
            choices=dict(run.num_choices),
            retries=dict(run.num_retries),
            handovers=dict(run.num_handovers),
            num_role_changes=run.num_role_changes,
            num_by_part=tuple(num for _, num in sorted(num_of.items())),
            good_by_part=tuple(num_good_of[part] / num for part, num in sorted(num_of.items())),
            num_events=run.num_events,
            conserved=run.conserved,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table; latencies in milliseconds."""
        latencies = (value for found in (self.ttft_ms, self.tpot_ms) for value in (found.p50, found.p90, found.p99))
        return (
            f"{self.name}, {self.policy}" if self.name else self.policy,
            *(f"{value:,.1f}" for value in latencies),
            f"{self.goodput:.2f}",
            f"{self.num_good / self.num_requests:.1%}",
            f"{self.num_refused:,}",
            f"{self.num_failed:,}",
            f"{self.worker_seconds:,.0f}",
        )


def print_findings(console: Console, findings: Sequence[Findings], *, title: str) -> None:
    """Print a table with a row for each run."""
    print_table(console, f"{title} (latencies in ms)", COLUMNS, [found.cells for found in findings])


def as_json(runs: Sequence[Run], findings: Sequence[Findings], conditions: dict[str, Any]) -> dict[str, Any]:
    """Scenario and numbers of each run as JSON values."""
    return {
        "conditions": conditions,
        "runs": [
            {"scenario": msgspec.to_builtins(run.scenario), "findings": asdict(found)}
            for run, found in zip(runs, findings, strict=True)
        ],
    }
