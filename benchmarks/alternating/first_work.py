"""How long it takes from a router's decision that a worker changes its role to the first work in the new one.

    ordered ── drain ──> engine stopped ── change ──> ready ── no prompt waits ── work waits ── first step ──> worked

All of it is read from the logs of routers and workers (JSON lines of one machine, so of one clock, to the millisecond).
A paced worker says when its first step of a role has ended: a prompt's first chunk, or the first tokens of answers.

A new prefill worker has nothing to do while no prompt waits, on whatever worker or in the router. A prompt waits for as
long as its first token took beyond the least that one of its length took in the run. For answers there is no such time:
a new decode worker relieves the others at once, so all of its time counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from benchmarks.load.report import print_table

MARK_S: Final = 1.0
"""First work should come sooner than this while work waits."""
ORDERED: Final = re.compile(r"worker (\S+) \(\S+\) is to change from \w+ to (\w+): ")
READY: Final = re.compile(r"is a (\w+) worker now: drained in ([\d.]+) s, changed in ([\d.]+) s")
WORKED: Final = re.compile(r"first step as a (\w+) worker$")

COLUMNS: Final = ("at s", "change", "drain", "change", "no work", "wait", "first step", "first work")

Line = Mapping[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One order, `at_s` seconds after the load began, and the seconds of its parts, in their order.

    `idle_s`: the worker was ready to compute prompts, and none waited. A worker that was never ready in the role, or
    got no work in it, has None for `step_s`.
    """

    at_s: float
    worker: str
    role: str
    drain_s: float = 0.0
    change_s: float = 0.0
    idle_s: float = 0.0
    wait_s: float = 0.0
    step_s: float | None = None

    @property
    def work_s(self) -> float | None:
        """From the order to the end of the first step, less the time in which no work waited."""
        return None if self.step_s is None else self.drain_s + self.change_s + self.wait_s + self.step_s


def role_changes(folder: Path, began_at: float) -> list[RoleChange]:
    """Of the processes that log into a folder, those that were ordered after `began_at` (seconds since 1970)."""
    lines = {log.stem: list(_lines(log)) for log in sorted(folder.glob("*.log"))}
    of_routers = [line for name, found in lines.items() if name.startswith("router") for line in found]
    said = ((_at(line), ORDERED.match(line["message"])) for line in of_routers)
    orders = sorted((at, match[1], match[2]) for at, match in said if match is not None and at >= began_at)
    waits = prompt_waits([line for line in of_routers if "ttft_ms" in line])
    found = []
    for number, (ordered_at, worker, role) in enumerate(orders):
        until = next((at for at, other, _ in orders[number + 1 :] if other == worker), float("inf"))
        own = [line for line in lines.get(worker, ()) if ordered_at <= _at(line) < until]
        found.append(_change(ordered_at, worker, role, own, waits, began_at))
    return found


def _change(
    ordered_at: float, worker: str, role: str, own: Sequence[Line], waits: Sequence[Span], began_at: float
) -> RoleChange:
    """`own`: what the worker logged from the order to its next one."""
    change = RoleChange(round(ordered_at - began_at, 3), worker, role)
    ready = next(((_at(line), match) for line in own if (match := _says(READY, line, role))), None)
    if ready is None:
        return change
    ready_at, drained_s, change_s = ready[0], float(ready[1][2]), float(ready[1][3])
    # A router that lost its core for a moment logs an order late: the worker knows how long it drained at least.
    drain_s = max(drained_s, ready_at - ordered_at - change_s)
    parts: dict[str, float] = {"drain_s": drain_s, "change_s": change_s}
    worked = next((line for line in own if _at(line) >= ready_at and _says(WORKED, line, role)), None)
    if worked is not None:
        worked_at = _at(worked)
        begun_at = worked_at - float(worked["step_s"])
        until_step_s = max(0.0, begun_at - ready_at)
        if role == "prefill":
            parts["idle_s"] = until_step_s - covered_s(waits, (ready_at, ready_at + until_step_s))
        parts["step_s"] = min(worked_at - begun_at, worked_at - ready_at)
        parts["wait_s"] = worked_at - ready_at - parts.get("idle_s", 0.0) - parts["step_s"]
    rounded = {name: round(seconds, 4) for name, seconds in parts.items()}
    return RoleChange(change.at_s, worker, role, **rounded)


def prompt_waits(requests: Sequence[Line]) -> list[Span]:
    """When prompts waited, by the lines of their requests: until the moment at which one alone would have begun."""
    least_ms: dict[int, float] = {}
    for line in requests:
        least_ms[line["prompt"]] = min(line["ttft_ms"], least_ms.get(line["prompt"], float("inf")))
    came_at = [_at(line) - line["total_ms"] / 1000 for line in requests]
    waited_s = [(line["ttft_ms"] - least_ms[line["prompt"]]) / 1000 for line in requests]
    return sorted((at, at + seconds) for at, seconds in zip(came_at, waited_s, strict=True))


def covered_s(spans: Sequence[Span], within: Span) -> float:
    """How much of `within` the spans, which come in the order of their begins, cover together."""
    at, end = within
    covered = 0.0
    for first, last in spans:
        first, last = max(first, at), min(last, end)
        if last > first:
            covered, at = covered + last - first, last
    return covered


def _says(pattern: re.Pattern[str], line: Line, role: str) -> re.Match[str] | None:
    match = pattern.match(line["message"])
    return match if match is not None and match[1] == role else None


def _at(line: Line) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line, half written, or words of a library
        if isinstance(entry, dict) and "time" in entry and "message" in entry:
            yield entry


def summarised(changes: Sequence[RoleChange]) -> dict[str, Any]:
    """The median and the worst in seconds, with and without the time in which no work waited."""
    worked = [(change.work_s, change.work_s + change.idle_s) for change in changes if change.work_s is not None]
    found: dict[str, Any] = {"num": len(changes), "num_worked": len(worked)}
    for name, seconds in (("while_work_waits", [one for one, _ in worked]), ("in_all", [one for _, one in worked])):
        found[f"{name}_median_s"] = round(median(seconds), 3) if seconds else None
        found[f"{name}_worst_s"] = round(max(seconds), 3) if seconds else None
    return found


def show(console: Console, changes: Sequence[RoleChange]) -> None:
    """Print a line for each change, and the median and the worst of all; nothing without changes."""
    if not changes:
        return
    rows = [
        (
            f"{one.at_s:.1f}",
            f"{one.worker} to {one.role}",
            *(_ms(seconds) for seconds in (one.drain_s, one.change_s, one.idle_s, one.wait_s, one.step_s)),
            "none" if one.work_s is None else _ms(one.work_s),
        )
        for one in changes
    ]
    print_table(console, "from the order to the first work in the new role, ms", COLUMNS, rows, left=(1,))
    found = summarised(changes)
    if found["num_worked"]:
        told = (
            "first work: {while_work_waits_median_s:.2f} s at the median, {while_work_waits_worst_s:.2f} at worst, "
            "or with the time in which no work waited {in_all_median_s:.2f} and {in_all_worst_s:.2f}"
        )
        console.print(told.format(**found), highlight=False)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f}"


def as_json(changes: Sequence[RoleChange]) -> list[dict[str, Any]]:
    return [asdict(change) | {"work_s": change.work_s} for change in changes]
