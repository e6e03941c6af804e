"""Draws a router's load as lines of text. Pure: an answer of /load comes in, styled lines come out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.top.figures import NONE, ago, duration, number, percent, percentile, size

WIDTH = 80
"""Columns that everything fits in; what is wider than the screen is cut."""
NUM_EVENTS = 5
"""Lines of the newest events."""
LEAST_WORKERS = 7
"""Lines, the head included, that workers have even where classes and plan must give way."""
NAME_WIDTH, REASON_WIDTH = 20, 60
"""Columns."""
TIMES = (
    ("First token (TTFT)", "ttft", "ttft"),
    ("Later token (TPOT)", "tpot", "tpot"),
    ("Between tokens", "itl", ""),
    ("Wait", "queue", ""),
    ("KV transfer", "transfer", ""),
    ("KV not hidden", "exposed_transfer", ""),
)
STAGES = {"queue": "waiting", "prefill": "prompt", "transfer": "KV transfer", "decode": "answer"}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

PLAIN, BOLD, DIM, WARM, BAD = "", "1", "2", "33", "31"
"""Styles, as ANSI codes."""
Style = str


@dataclass(frozen=True)
class Line:
    """A line of text in one style."""

    text: str
    style: Style = PLAIN

    def shown(self, width: int, *, styled: bool) -> str:
        """Cut to so many columns."""
        text = self.text[:width].rstrip()
        return f"\x1b[{self.style}m{text}\x1b[0m" if styled and self.style and text else text


def picture(load: Mapping[str, Any], num_lines: int = 0) -> list[Line]:
    """All of a load, the most important lines first; of many workers as many as fit `num_lines` (0: all)."""
    head = [*_now(load), Line(""), *_times(load), Line("")]
    tail = [*_classes(load), *_plan(load), *_events(load)]
    workers = _workers(load)
    shown = workers[: max(LEAST_WORKERS, num_lines - len(head) - len(tail))] if num_lines else workers
    if len(shown) < len(workers):
        shown[-1] = Line(f"... and {len(workers) - len(shown) + 1:,} lines more: a higher window shows them", DIM)
    return [*head, *shown, *tail]


def clean(value: object) -> str:
    """Text of a worker or a key, without what a terminal would obey."""
    return CONTROL.sub("?", str(value))


def _now(load: Mapping[str, Any]) -> list[Line]:
    rates, stages = load["traffic"]["rates"], load["stages"]
    cached, prompt = rates["cached_tokens_per_s"], rates["prompt_tokens_per_s"]
    hits = f" ({percent(cached / prompt)} cached)" if prompt else ""
    failed = f", {number(rates['failed_per_s'])}/s failed" if rates["failed_per_s"] else ""
    models = load["models"]
    names = ", ".join(_model(one) for one in models)
    return [
        Line(f"{'Models' if len(models) > 1 else 'Model':<12}{names}", PLAIN if all(map(_is_ready, models)) else WARM),
        Line(f"Requests    {number(rates['requests_per_s'])}/s{failed}", WARM if failed else PLAIN),
        Line(
            f"In flight   {load['server_load']:,}: "
            + ", ".join(f"{count:,} {STAGES.get(name, clean(name))}" for name, count in stages.items())
        ),
        Line(f"Tokens      {number(rates['output_tokens_per_s'])}/s output, {number(prompt)}/s prompt{hits}"),
        Line(f"KV moved    {size(rates['transfer_bytes_per_s'])}/s in {number(rates['transfers_per_s'])} transfers/s"),
        *_pools(load),
    ]


def _is_ready(model: Mapping[str, Any]) -> bool:
    """Routers of before say nothing of it."""
    return bool(model.get("ready", True))


def _model(one: Mapping[str, Any]) -> str:
    away = "" if _is_ready(one) else ", no worker is ready"
    return f"{clean(one['id'])} ({one['max_model_len']:,} tokens{away})"


def _pools(load: Mapping[str, Any]) -> list[Line]:
    lines = []
    for role in ("prefill", "decode"):
        all_of = [one for one in load["workers"] if one["role"] == role]
        ready = [one for one in all_of if one["state"] == "ready"]
        used = _used(ready)
        blocks = f", KV blocks {percent(used):>5} {_bar(used)}" if used is not None else ""
        text = f"{role.capitalize():<11} {len(ready):,} of {len(all_of):,} ready{blocks}"
        lines.append(Line(text, WARM if len(ready) < len(all_of) else PLAIN))
    return lines


def _used(workers: Sequence[Mapping[str, Any]]) -> float | None:
    blocks = sum(one["num_blocks"] for one in workers)
    return 1 - sum(one["num_available_blocks"] for one in workers) / blocks if blocks else None


def _bar(share: float, width: int = 20) -> str:
    full = min(width, max(0, round(share * width)))
    return f"[{'|' * full}{' ' * (width - full)}]"


def _times(load: Mapping[str, Any]) -> list[Line]:
    traffic = load["traffic"]
    minutes = f"last {traffic['window_s'] / 60:.0f} minutes"
    lines = [Line(f"{minutes:<20}{'p50':>10}{'p90':>10}{'p99':>10}{'number':>10}{'goal':>10}", BOLD)]
    default: Mapping[str, Any] = next((one for one in load["classes"] if one["name"] == "default"), {})
    for name, kind, goal in TIMES:
        times, wanted_ms = traffic[kind], default.get(f"{goal}_ms", 0) if goal else 0
        shares = "".join(f"{percentile(times, share):>10}" for share in ("p50_ms", "p90_ms", "p99_ms"))
        wanted = duration(wanted_ms) if wanted_ms else ""
        missed = bool(wanted_ms and times["num"] and times["p90_ms"] > wanted_ms)
        lines.append(Line(f"{name:<20}{shares}{number(times['num']):>10}{wanted:>10}", WARM if missed else PLAIN))
    return lines


def _classes(load: Mapping[str, Any]) -> list[Line]:
    """Nothing for a service of one class without goals."""
    classes = load["classes"]
    if not any(one["attainment"] for one in classes) and len(classes) < 2:
        return []
    head = f"{'class':<20}{'in flight':>10}{'waiting':>10}{'refused':>10}{'TTFT met':>10}{'TPOT met':>10}"
    lines = [Line(""), Line(head, BOLD)]
    goal = (load["plan"] or {}).get("quantile", 0.95)
    for one in classes:
        met = [one["attainment"].get(name) for name in ("ttft", "tpot")]
        shares = "".join(f"{NONE if share is None else percent(share):>10}" for share in met)
        counts = "".join(f"{one[name]:>10,}" for name in ("num_in_flight", "num_waiting", "num_refused"))
        missed = any(share is not None and share < goal for share in met)
        lines.append(Line(f"{clean(one['name'])[:19]:<20}{counts}{shares}", BAD if missed else PLAIN))
    return lines


def _plan(load: Mapping[str, Any]) -> list[Line]:
    plan = load["plan"]
    if plan is None:
        return []
    lines = [Line(""), Line("plan", BOLD)]
    if plan["unmet"]:
        lines.append(Line(f"The goals cannot be met: {clean(plan['unmet'])}", BAD))
    if plan["held"]:
        lines.append(Line(f"The plan does not change: {clean(plan['held'])}", WARM))
    for role, pool in plan["pools"].items():
        text = f"{role}: {pool['present']} present, {pool['wanted']} wanted, {pool['needed']} needed. "
        lines.append(Line(text + clean(pool["reason"]), WARM if pool["present"] < pool["wanted"] else PLAIN))
    return lines


def _workers(load: Mapping[str, Any]) -> list[Line]:
    """Workers in trouble first."""
    head = f"{'worker':<21}{'role':<8}{'state':<10}{'requests':>8}{'queued':>8}{'wait':>8}{'KV used':>8}{'tok/s':>8}"
    order = sorted(load["workers"], key=lambda one: (one["state"] == "ready", one["role"] != "prefill", _name(one)))
    several = len(load["models"]) > 1
    return [Line(head, BOLD), *(line for one in order for line in _worker(one, several=several))]


def _name(worker: Mapping[str, Any]) -> tuple[int, str]:
    """So that decode-9 comes before decode-10."""
    name = clean(worker["worker_id"] or worker["address"])
    return len(name), name


def _worker(one: Mapping[str, Any], *, several: bool) -> list[Line]:
    used = _used([one])
    name = _name(one)[1]
    name = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}~"
    text = (
        f"{name:<21}{one['role'][:7]:<8}{clean(one['state'])[:9]:<10}{one['num_requests']:>8,}"
        f"{number(one['num_queued_tokens']):>8}{duration(one['wait_s'] * 1e3):>8}"
        f"{NONE if used is None else percent(used):>8}{number(one['tokens_per_s']):>8}"
    )
    if several and one.get("model"):
        text += f"  {clean(one['model'])}"
    if one["state"] == "ready":
        return [Line(text)]
    reason = clean(one["reason"])
    why = [Line(f"  {reason[:REASON_WIDTH]}", DIM)] if reason and reason != one["state"] else []
    return [Line(text, BAD if one["state"] in ("dead", "unknown") else WARM), *why]


def _events(load: Mapping[str, Any]) -> list[Line]:
    events = load["events"][:NUM_EVENTS]
    lines = []
    for one in events:
        detail = f": {clean(one['detail'])}" if one["detail"] else ""
        text = f"{ago(one['age_s']):>10}  {clean(one['role'])} {clean(one['worker'])} {clean(one['kind'])}{detail}"
        lines.append(Line(text, BAD if one["kind"] == "lost" else PLAIN))
    return [Line(""), Line("events", BOLD), *lines] if lines else []
