"""Predicted against measured TTFT and TPOT of single requests, on paced clusters and on a small real model.

The router logs what it predicted for a request when it placed it, so all predictions are made ahead of what they
predict. Workers go on fitting their models meanwhile; requests of the first part of the load are left out. Real workers
get loads in proportion to their own rate, so that the same share of it is used on every machine: near the whole of it,
queues grow without bound and what is measured is chance. Beside the errors of one paced prefill worker stands their
floor: the same arrivals at a virtual worker (`foresight.py`). Beside those of a real one stand the errors of a virtual
worker with its model that knew all arrivals, those of the worker's model of steps where it was known how many draft
tokens would be accepted, or, without draft tokens, which answers would run side by side (`batches.py`), the first and
the last also without what came after the request, and, where each worker has a core, how far the same load served a
second time by new processes is from the first: a predictor that had seen everything happen once would be that far off.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
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
from benchmarks.load.workload import LengthRange
from benchmarks.paced.model import Coefficients
from benchmarks.paced.stack import EXAMPLE, PacedStack
from benchmarks.prompt_order import VirtualPrompt
from benchmarks.sla.batches import Decoded, come_before, token_seconds
from benchmarks.sla.foresight import foreseen
from benchmarks.sla.real import ANSWER_S, requests_logged, served
from benchmarks.sla.step import Numbers, Settings, Step
from benchmarks.stack import Stack, StackSettings
from common.latency.step_model import StepModel

PACED, POOLS, LIGHT, SHARED, OWN, OWN_PLAIN = (
    "paced 1P1D",
    "paced 3P3D",
    "paced 3P3D, 12 requests/s alone",
    "real model, 1P1D, shared cores",
    "real model, 1P1D, a core each",
    "the same without draft tokens",
)
HINDSIGHT: Final = ", all known and all later prompts"
FORESIGHT: Final = ", all known but later prompts"
ACCEPTED: Final = ", the accepted draft tokens known"
BESIDE: Final = ", the answers beside each known"
BEFORE: Final = ", the answers beside each known but later ones"
AGAIN: Final = ", the same load once more"
LEARNING: Final = 0.3
"""Of the requests, while workers fit their models."""
ROUTER_FLAGS: Final = ("--log-json",)
MARKS: Final = {"TTFT": (0.10, 0.25), "TPOT": (0.08, None)}
NUM_SMALL_MS: Final = 0.01
REAL_LOADS: Final = (0.2, 0.35, 0.5)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a load is served: so many paced workers of each role, or 0: a real model on 1P1D.

    `loads`, for equal parts of the time: requests a second at paced workers; at a real one, shares of the time that it
    would need for the prompts alone. `own_cores`: a core for each worker.
    """

    name: str
    num_paced: int
    loads: tuple[float, ...]
    own_cores: bool = False
    drafts: bool = True

    @property
    def lengths(self) -> tuple[str, str]:
        """Of prompts and answers."""
        return ("200-1500", "20-80") if self.num_paced else ("32-256", "16-48")

    def profile(self, stack: Stack, seconds: float) -> RateProfile:
        """The rates over so many seconds, for workers that are warm."""
        unit = 1.0 if self.num_paced else prompts_per_s(*said_by(stack, "prefill"), LengthRange.parse(self.lengths[0]))
        each_s = seconds / len(self.loads)
        return RateProfile.steps(",".join(f"{unit * load:.4f}x{each_s:g}" for load in self.loads))

    def stack(self, model: str, log_dir: Path) -> Stack:
        if self.num_paced:
            return PacedStack(StackSettings(self.num_paced, self.num_paced, router_flags=ROUTER_FLAGS, log_dir=log_dir))
        prefill, decode = sorted(os.sched_getaffinity(0))[:2] if self.own_cores else (None, None)
        return Stack(
            StackSettings(
                1,
                1,
                model=model,
                router_flags=ROUTER_FLAGS,
                prefill_cores=() if prefill is None else (prefill,),
                decode_cores=() if decode is None else (decode,),
                decode_flags=() if self.drafts else ("--max-draft-tokens", "0"),
                log_dir=log_dir,
            )
        )


PLACES: Final = (
    Place(PACED, 1, (4.0, 10.0, 16.0)),
    Place(POOLS, 3, (12.0, 24.0, 36.0)),
    Place(LIGHT, 3, (12.0,)),
    Place(SHARED, 0, REAL_LOADS),
    Place(OWN, 0, REAL_LOADS, own_cores=True),
    Place(OWN_PLAIN, 0, REAL_LOADS, own_cores=True, drafts=False),
)


Pairs = dict[str, list[tuple[float, float]]]
"""By latency, TTFT and TPOT: (predicted, measured) in ms."""


@dataclass(frozen=True, slots=True)
class Run:
    """A load that was served: its rates, its requests, and what the router said of each; `floors` by name."""

    profile: RateProfile
    records: list[RequestRecord]
    pairs: Pairs
    floors: dict[str, Pairs]


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    pairs: dict[str, Pairs] = {}
    floors: dict[str, Pairs] = {}
    places = [place for place in PLACES if not place.own_cores or len(os.sched_getaffinity(0)) > 1]
    with tempfile.TemporaryDirectory(prefix="diptych-sla-") as folder:
        for number, place in enumerate(places):
            run = run_at(place, settings, Path(folder) / f"{number}", tell)
            pairs[place.name] = run.pairs
            floors |= run.floors
            if place.own_cores:
                tell(f"{place.name}: the same load once more")
                again = run_at(place, settings, Path(folder) / f"{number}-again", tell, run.profile)
                floors[place.name + AGAIN] = twice_ms(run.records, again.records)
    rows = [row for name, found in (pairs | floors).items() for row in summarised(name, found)]
    return {"pairs": pairs, "summary": rows}


def run_at(
    place: Place, settings: Settings, log_dir: Path, tell: Callable[[str], None], profile: RateProfile | None = None
) -> Run:
    """Start the place's workers and send them its load, or these rates."""
    tell(f"{place.name}: starts")
    rates = [profile] if profile is not None else []

    def once_warm() -> RateProfile:
        if not rates:
            rates.append(place.profile(stack, settings.real_s))
        return rates[0]

    floors: dict[str, Pairs] = {}
    with place.stack(settings.model, log_dir) as stack:
        tell(f"{place.name}: {settings.real_s:g} s of load")
        records = served(stack, once_warm, place.lengths, seed=settings.seed)
        lines = requests_logged(stack.router.log, sum(record.ok for record in records))
        if place.name == PACED:
            floors[PACED + FORESIGHT] = {"TTFT": foreseen_ms(records, said_by(stack, "prefill")[1])}
        if place.num_paced == 1 or not place.drafts:  # one decode worker, and a token a step
            model, _ = said_by(stack, "decode")
            floors[place.name + BESIDE] = {"TPOT": beside_ms(lines, model)}
            floors[place.name + BEFORE] = {"TPOT": beside_ms(lines, model, come_before)}
        if not place.num_paced:
            known = known_ms(lines, *said_by(stack, "prefill"))
            floors |= {
                place.name + name: {"TTFT": found} for name, found in zip((HINDSIGHT, FORESIGHT), known, strict=True)
            }
            if place.drafts:
                floors[place.name + ACCEPTED] = {"TPOT": accepted_ms(lines[int(LEARNING * len(lines)) :])}
    return Run(rates[0], records, pairs_of(lines[int(LEARNING * len(lines)) :]), floors)


def twice_ms(first: Sequence[RequestRecord], second: Sequence[RequestRecord]) -> Pairs:
    """(first, second) time of each request that both runs answered, those of the learning part left out."""
    later = {record.index: record for record in second if record.ok}
    both = [(record, later[record.index]) for record in first if record.ok and record.index in later]
    both = sorted(both, key=lambda pair: pair[0].start)[int(LEARNING * len(both)) :]
    ttft = [(1e3 * one.ttft_s, 1e3 * other.ttft_s) for one, other in both]
    tpot = [(1e3 * one.tpot_s, 1e3 * other.tpot_s) for one, other in both]
    return {"TTFT": ttft, "TPOT": [pair for pair in tpot if not any(map(math.isnan, pair))]}


def said_by(stack: Stack, role: str) -> tuple[StepModel, int]:
    """What the stack's first worker of this role says now: its model, and the prompt tokens of a step."""
    answer = httpx.get(f"{stack.url}/load", timeout=ANSWER_S, trust_env=False)
    workers = answer.raise_for_status().json()["workers"]
    worker = next(worker for worker in workers if worker["role"] == role)
    return StepModel(**worker["step_model"]), int(worker["step_tokens"])


def prompts_per_s(model: StepModel, step_tokens: int, lengths: LengthRange) -> float:
    """What a prefill worker computes of such prompts at most."""
    each = (lengths.low + lengths.high) / 2
    return model.tokens_per_s(step_tokens) / each


def foreseen_ms(records: Sequence[RequestRecord], step_tokens: int) -> list[tuple[float, float]]:
    """(foreseen, then happened) TTFT in ms at a virtual worker with the paced one's pace, learning left out."""
    prompts = prompts_of(records)
    found = foreseen(prompts, Coefficients.read(EXAMPLE).prefill.model(), step_tokens)
    return [(1e3 * before, 1e3 * after) for before, after in found[int(LEARNING * len(found)) :]]


def known_ms(
    lines: Sequence[Mapping[str, Any]], model: StepModel, step_tokens: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(said, measured) TTFT in ms of the prompts that the prefill worker computed, of a router's log: by two floors.

    A virtual worker says it that had the same prompts, and steps that `model` times. The first knows all that a router
    can only guess, later prompts included: what is left is how much steps vary. The second knows the worker's state
    at each prompt's arrival, and no later prompt: nothing that decides at a prompt's arrival can know more.
    """
    there = [line for line in lines if line["prefill_worker"] != "none" and line["attempts"] == 1]
    found = sorted(((_came_at(line), line) for line in there), key=lambda pair: pair[0])
    prompts = [VirtualPrompt(at, line["prompt"] - line["cached"], math.inf) for at, line in found]
    told = foreseen(prompts, model, step_tokens)
    pairs = [
        (1e3 * before, 1e3 * after, line["ttft_ms"]) for (before, after), (_, line) in zip(told, found, strict=True)
    ]
    pairs = pairs[int(LEARNING * len(pairs)) :]
    return [(after, measured) for _, after, measured in pairs], [(before, measured) for before, _, measured in pairs]


def _came_at(line: Mapping[str, Any]) -> float:
    """When the request of a log's line came, in seconds since 1970: the line is written at its end."""
    return datetime.fromisoformat(line["time"]).timestamp() - float(line["total_ms"]) / 1e3


def accepted_ms(lines: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(said, measured) TPOT in ms, of a router's log, where the steps that draft tokens saved were known ahead.

    Each accepted one saves a step; that a step which checks some takes longer is left out.
    """
    return [
        (line["predicted_step_ms"] * (1.0 - line.get("accepted", 0) / later), line["decode_ms"] / later)
        for line in lines
        if line.get("attempts") == 1 and (later := line["output"] - 1) > 0 and line["predicted_step_ms"] > 0
    ]


def beside_ms(
    lines: Sequence[Mapping[str, Any]],
    model: StepModel,
    known: Callable[[Decoded, Sequence[Decoded]], Sequence[Decoded]] = lambda answer, answers: answers,
) -> list[tuple[float, float]]:
    """(said, measured) TPOT in ms, of one decode worker's log lines, by the answers beside each that are `known`."""
    answers = []
    for line in lines:
        if line["attempts"] == 1 and line["output"] > 1:
            last_at = datetime.fromisoformat(line["time"]).timestamp()
            first_at = last_at - line["decode_ms"] / 1e3
            answers.append(Decoded(_came_at(line), first_at, last_at, line["output"] - 1, line["prompt"]))
    answers.sort(key=lambda answer: answer.first_at)
    return [
        (
            1e3 * token_seconds(answer, known(answer, answers), model),
            1e3 * (answer.last_at - answer.first_at) / answer.num_later,
        )
        for answer in answers[int(LEARNING * len(answers)) :]
    ]


def prompts_of(records: Sequence[RequestRecord]) -> list[VirtualPrompt]:
    """The prompts that were answered, in order of their arrival."""
    found = [record for record in sorted(records, key=lambda record: record.start) if record.ok]
    return [VirtualPrompt(each.start, each.prompt_tokens, math.inf) for each in found]


def pairs_of(lines: Sequence[Mapping[str, Any]]) -> Pairs:
    """(predicted, measured) in ms, from a router's log; requests that were placed once."""
    once = [line for line in lines if line.get("attempts") == 1]
    ttft = [(line["predicted_ttft_ms"], line["queue_ms"] + line["prefill_ms"]) for line in once]
    tpot = [
        (line["predicted_token_ms"], line["decode_ms"] / (line["output"] - 1))
        for line in once
        if line["output"] > 1 and line["predicted_token_ms"] > 0
    ]
    return {
        name: [(round(predicted, 3), round(measured, 3)) for predicted, measured in values if measured > NUM_SMALL_MS]
        for name, values in (("TTFT", ttft), ("TPOT", tpot))
    }


def summarised(name: str, found: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Quantiles of |predicted - measured| / measured."""
    rows = []
    for latency, pairs in found.items():
        if not pairs:
            continue
        predicted, measured = np.asarray(pairs).T
        errors = np.abs(predicted - measured) / measured
        p50, p90 = (round(float(each), 4) for each in np.percentile(errors, (50, 90)))
        bias = round(float(np.median(measured / np.maximum(NUM_SMALL_MS, predicted))), 3)
        rows.append(
            {"where": name, "latency": latency, "num": len(pairs), "p50": p50, "p90": p90, "measured_over": bias}
        )
    return rows


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    columns = ("where", "latency", "requests", "error p50", "mark", "error p90", "mark", "measured over predicted")
    rows = [
        (
            row["where"],
            row["latency"],
            f"{row['num']}",
            f"{row['p50']:.1%}",
            _mark(MARKS[row["latency"]][0]),
            f"{row['p90']:.1%}",
            _mark(MARKS[row["latency"]][1]),
            f"{row['measured_over']:.2f}",
        )
        for row in numbers["summary"]
    ]
    print_table(console, "predicted against measured", columns, rows, left=(0, 1))


def _mark(mark: float | None) -> str:
    return "-" if mark is None else f"{mark:.0%}"


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    pairs = numbers["pairs"]
    figure = Figure(figsize=(10, 4.8 * len(pairs)), layout="constrained")
    for row, (name, found) in enumerate(pairs.items()):
        for column, (latency, values) in enumerate(found.items()):
            axes = figure.add_subplot(len(pairs), len(found), row * len(found) + column + 1)
            axes.set(title=f"{name}: {latency}", xlabel="predicted, ms", ylabel="measured, ms")
            if not values:
                continue
            predicted, measured = np.asarray(values).T
            axes.scatter(predicted, measured, s=8, alpha=0.5)
            ends = [max(NUM_SMALL_MS, min(predicted.min(), measured.min())), max(predicted.max(), measured.max())]
            axes.plot(ends, ends, color="#444444", linewidth=1)
            axes.fill_between(
                ends, [0.75 * end for end in ends], [1.25 * end for end in ends], alpha=0.1, color="#444444"
            )
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                sparse_numbers(axis)
            axes.grid(alpha=0.2)
    save(figure, path, title)


STEP: Final = Step("prediction", "predicted against measured latencies of requests", measure, show, draw)
