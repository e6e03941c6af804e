"""Knobs over time on a paced 1P1D cluster while the rate steps up and down, with the tails beside the goals."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.load.arrivals import RateProfile
from benchmarks.load.plot import save, sparse_numbers
from benchmarks.load.report import print_table
from benchmarks.load.summary import RequestRecord
from benchmarks.paced.stack import PacedStack
from benchmarks.sla.real import ANSWER_S, served
from benchmarks.sla.step import Numbers, Settings, Step
from benchmarks.stack import StackSettings

TTFT_MS, TPOT_MS = 500.0, 20.0
RATES: Final = (4.0, 10.0, 18.0, 6.0)
LENGTHS: Final = ("200-1500", "40-120")
KNOB: Final = re.compile(r'^diptych_knob\{[^}]*knob="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)
LOOK_S, WINDOW_S = 1.0, 3.0


class KnobWatch:
    """Reads the knobs of workers, each second."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls`: where each worker answers `/metrics`, by its name."""
        self.lines: dict[str, list[tuple[float, float]]] = {}
        self._urls = urls

    async def run(self) -> None:
        """Poll until the task is cancelled."""
        began = time.perf_counter()
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client:
            while True:
                for worker, url in self._urls.items():
                    await self._look(client, worker, url, began)
                await asyncio.sleep(LOOK_S)

    async def _look(self, client: httpx.AsyncClient, worker: str, url: str, began: float) -> None:
        try:
            text = (await client.get(f"{url}/metrics")).raise_for_status().text
        except httpx.HTTPError:
            return  # a busy machine: the next look is in a second
        at_s = round(time.perf_counter() - began, 2)
        for knob, value in knobs_in(text).items():
            self.lines.setdefault(f"{worker} {knob}", []).append((at_s, value))


def knobs_in(text: str) -> dict[str, float]:
    """Knobs by name in a worker's metrics."""
    return {knob: float(value) for knob, value in KNOB.findall(text)}


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    goals = (f"--slo-tpot-ms={TPOT_MS:g}",)
    router_flags = (f"--slo-ttft-ms={TTFT_MS:g}", *goals)
    tell("starts")
    with PacedStack(StackSettings(1, 1, decode_flags=goals, router_flags=router_flags)) as stack:
        watch = KnobWatch({worker.name: worker.http_url for worker in stack.workers()})
        profile = RateProfile.steps(",".join(f"{rate:g}x{settings.real_s / len(RATES):g}" for rate in RATES))
        tell(f"{settings.real_s:g} s of load")
        records = served(stack, lambda: profile, LENGTHS, seed=settings.seed, beside=watch.run)
    num_good = sum(record.meets(TTFT_MS, TPOT_MS) for record in records)
    return {
        "rates": RATES,
        "seconds": settings.real_s,
        "goals": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS},
        "num_requests": len(records),
        "num_refused": sum(record.outcome == "http 429" for record in records),
        "num_good": num_good,
        "knobs": watch.lines,
        "tails": tails_of(records),
    }


def tails_of(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """By windows of arrivals: p95 of both latencies in ms, None without one, and requests a second."""
    origin = min((record.start for record in records), default=0.0)
    windows: dict[int, list[RequestRecord]] = {}
    for record in records:
        windows.setdefault(int((record.start - origin) / WINDOW_S), []).append(record)
    return [
        {
            "at_s": (number + 0.5) * WINDOW_S,
            "rate": round(len(here) / WINDOW_S, 2),
            "ttft_p95_ms": _p95([record.ttft_s for record in here if record.ok]),
            "tpot_p95_ms": _p95([record.tpot_s for record in here if record.ok and not math.isnan(record.tpot_s)]),
        }
        for number, here in sorted(windows.items())
    ]


def _p95(seconds: Sequence[float]) -> float | None:
    return round(float(np.percentile(seconds, 95)) * 1e3, 2) if seconds else None


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    rows = []
    for name, line in sorted(numbers["knobs"].items()):
        values = [value for _, value in line]
        changes = sum(one != other for one, other in zip(values, values[1:], strict=False))
        rows.append((name, f"{values[0]:g}", f"{min(values):g}", f"{max(values):g}", f"{values[-1]:g}", f"{changes}"))
    print_table(console, "knobs", ("knob", "first", "least", "most", "last", "changes"), rows)
    share = numbers["num_good"] / max(1, numbers["num_requests"])
    told = f"{share:.1%} of {numbers['num_requests']} requests met both goals, {numbers['num_refused']} were refused"
    console.print(told, highlight=False)


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    figure = Figure(figsize=(12, 9), layout="constrained")
    knobs, tails = figure.subplots(2, 1, sharex=True)
    for name, line in sorted(numbers["knobs"].items()):
        values = [value for _, value in line]
        if max(values) > 0:
            shares = [value / max(values) for value in values]
            knobs.step([at for at, _ in line], shares, where="post", label=f"{name}, most {max(values):g}")
    knobs.set(title="knobs, each over its most", ylim=(0, 1.05))
    knobs.legend(loc="lower left", fontsize=8)
    at = [window["at_s"] for window in numbers["tails"]]
    for name, colour in (("ttft", "#2f6fb5"), ("tpot", "#2b8a5b")):
        found = [window[f"{name}_p95_ms"] for window in numbers["tails"]]
        tails.plot(
            at, [math.nan if value is None else value for value in found], color=colour, label=f"{name.upper()} p95"
        )
        tails.axhline(numbers["goals"][f"{name}_ms"], color=colour, linestyle="--", linewidth=1, label="goal")
    tails.set(title="tails beside the goals", xlabel="seconds", ylabel="ms", yscale="log")
    sparse_numbers(tails.yaxis)
    rates = tails.twinx()
    rates.step(at, [window["rate"] for window in numbers["tails"]], where="mid", color="#444444", label="requests/s")
    rates.set(ylabel="requests/s", ylim=(0, None))
    tails.legend(loc="upper left", fontsize=8)
    save(figure, path, title)


STEP: Final = Step("knobs", "knobs and tails over time while the rate changes", measure, show, draw)
