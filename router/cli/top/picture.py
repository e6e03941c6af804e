"""Draws a router's load for a terminal. Pure: an answer of /load comes in, what `rich` prints comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.cli.top.figures import NONE, ago, duration, number, percent, percentile, size

WIDTH = 80
"""Columns that fit everything; a narrower terminal cuts lines."""
NUM_EVENTS = 5
"""Number of newest events that are shown, and of workers in trouble whose reasons are shown."""
MIN_WORKER_LINES = 7
"""Lines of the table of workers, its header included, that classes and plan do not take."""
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

PLAIN, BOLD, DIM, WARM, BAD = "", "bold", "dim", "yellow", "red"

Part = Text | Table
"""A line of text, or a table whose rows and header take one line each."""


def picture(load: Mapping[str, Any], num_lines: int = 0) -> Group:
    """Draw a load, the most important lines first. Shows as many workers as fit `num_lines` (0: all)."""
    above: list[Part] = [*_now(load), line(""), _times(load), line("")]
    workers = sorted(load["workers"], key=lambda one: (one["state"] == "ready", one["role"] != "prefill", _name(one)))
    below: list[Part] = [*_reasons(workers), *_classes(load), *_plan(load), *_events(load)]
    shown = workers
    if num_lines:
        room = max(MIN_WORKER_LINES, num_lines - _height(above) - _height(below)) - 1
        if room < len(workers):
            shown = workers[: room - 1]
            below.insert(
                0, line(f"... and {len(workers) - len(shown):,} workers more: a taller window shows them", DIM)
            )
    return Group(*above, _workers(shown, several=len(load["models"]) > 1), *below)


def line(text: str, style: str = PLAIN) -> Text:
    """A line that is cut at the edge of the terminal."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _height(parts: Sequence[Part]) -> int:
    return sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in parts)


def _table(names: Mapping[str, int]) -> Table:
    """An empty table of columns by name with their widths: the first to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style=BOLD)
    for place, (name, width) in enumerate(names.items()):
        is_text = place == 0 or name in ("role", "state", "model")
        table.add_column(Text(name), justify="left" if is_text else "right", width=width or None, no_wrap=True)
    return table


def _add(table: Table, cells: Sequence[str], style: str = PLAIN) -> None:
    """Add a row of plain text: rich would read markup in a string."""
    table.add_row(*map(Text, cells), style=style)


def clean(value: object) -> str:
    """Text of a worker or a key, without what a terminal would obey."""
    return CONTROL.sub("?", str(value))


def _now(load: Mapping[str, Any]) -> list[Text]:
    rates, stages = load["traffic"]["rates"], load["stages"]
    cached, prompt = rates["cached_tokens_per_s"], rates["prompt_tokens_per_s"]
    hits = f" ({percent(cached / prompt)} cached)" if prompt else ""
    failed = f", {number(rates['failed_per_s'])}/s failed" if rates["failed_per_s"] else ""
    models = load["models"]
    names = ", ".join(_model(one) for one in models)
    return [
        line(
            f"{'Models' if len(models) > 1 else 'Model':<12}{names}",
            PLAIN if all(one["ready"] for one in models) else WARM,
        ),
        line(f"Requests    {number(rates['requests_per_s'])}/s{failed}", WARM if failed else PLAIN),
        line(
            f"In flight   {load['server_load']:,}: "
            + ", ".join(f"{count:,} {STAGES.get(name, clean(name))}" for name, count in stages.items())
        ),
        line(f"Tokens      {number(rates['output_tokens_per_s'])}/s output, {number(prompt)}/s prompt{hits}"),
        line(f"KV moved    {size(rates['transfer_bytes_per_s'])}/s in {number(rates['transfers_per_s'])} transfers/s"),
        *_pools(load),
    ]


def _model(one: Mapping[str, Any]) -> str:
    away = "" if one["ready"] else ", no worker is ready"
    return f"{clean(one['id'])} ({one['max_model_len']:,} tokens{away})"


def _pools(load: Mapping[str, Any]) -> list[Text]:
    lines = []
    for role in ("prefill", "decode"):
        all_of = [one for one in load["workers"] if one["role"] == role]
        ready = [one for one in all_of if one["state"] == "ready"]
        used = _used(ready)
        blocks = f", KV blocks {percent(used):>5} {_bar(used)}" if used is not None else ""
        text = f"{role.capitalize():<11} {len(ready):,} of {len(all_of):,} ready{blocks}"
        lines.append(line(text, WARM if len(ready) < len(all_of) else PLAIN))
    return lines


def _used(workers: Sequence[Mapping[str, Any]]) -> float | None:
    blocks = sum(one["num_blocks"] for one in workers)
    return 1 - sum(one["num_available_blocks"] for one in workers) / blocks if blocks else None


def _bar(share: float, width: int = 20) -> str:
    full = min(width, max(0, round(share * width)))
    return f"[{'|' * full}{' ' * (width - full)}]"


def _times(load: Mapping[str, Any]) -> Table:
    traffic = load["traffic"]
    minutes = f"last {traffic['window_s'] / 60:.0f} minutes"
    table = _table({minutes: 20, "p50": 9, "p90": 9, "p99": 9, "number": 9, "goal": 9})
    default: Mapping[str, Any] = next((one for one in load["classes"] if one["name"] == "default"), {})
    for name, kind, goal in TIMES:
        times, wanted_ms = traffic[kind], default.get(f"{goal}_ms", 0) if goal else 0
        shares = (percentile(times, share) for share in ("p50_ms", "p90_ms", "p99_ms"))
        missed = bool(wanted_ms and times["num"] and times["p90_ms"] > wanted_ms)
        wanted = duration(wanted_ms) if wanted_ms else ""
        _add(table, (name, *shares, number(times["num"]), wanted), WARM if missed else PLAIN)
    return table


def _classes(load: Mapping[str, Any]) -> list[Part]:
    """Nothing for a service with one class and no goals."""
    classes = load["classes"]
    if not any(one["attainment"] for one in classes) and len(classes) < 2:
        return []
    table = _table({"class": 20, "in flight": 9, "waiting": 9, "refused": 9, "TTFT met": 9, "TPOT met": 9})
    goal = (load["plan"] or {}).get("quantile", 0.95)
    for one in classes:
        met = [one["attainment"].get(name) for name in ("ttft", "tpot")]
        shares = (NONE if share is None else percent(share) for share in met)
        counts = (f"{one[name]:,}" for name in ("num_in_flight", "num_waiting", "num_refused"))
        missed = any(share is not None and share < goal for share in met)
        _add(table, (clean(one["name"]), *counts, *shares), BAD if missed else PLAIN)
    return [line(""), table]


def _plan(load: Mapping[str, Any]) -> list[Text]:
    plan = load["plan"]
    if plan is None:
        return []
    lines = [line(""), line("plan", BOLD)]
    if plan["unmet"]:
        lines.append(line(f"The goals cannot be met: {clean(plan['unmet'])}", BAD))
    if plan["held"]:
        lines.append(line(f"The plan does not change: {clean(plan['held'])}", WARM))
    for role, pool in plan["pools"].items():
        text = f"{role}: {pool['present']} present, {pool['wanted']} wanted, {pool['needed']} needed. "
        lines.append(line(text + clean(pool["reason"]), WARM if pool["present"] < pool["wanted"] else PLAIN))
    return lines


def _workers(workers: Sequence[Mapping[str, Any]], *, several: bool) -> Table:
    columns = {"worker": 20, "role": 7, "state": 9, "requests": 8, "queued": 7, "wait": 7, "KV used": 7, "tok/s": 7}
    table = _table(columns | ({"model": 0} if several else {}))
    for one in workers:
        used = _used([one])
        cells = [_name(one)[1], one["role"], clean(one["state"]), f"{one['num_requests']:,}"]
        cells += [number(one["num_queued_tokens"]), duration(one["wait_s"] * 1e3)]
        cells += [NONE if used is None else percent(used), number(one["tokens_per_s"])]
        cells += [clean(one.get("model", ""))] if several else []
        bad = BAD if one["state"] in ("dead", "unknown") else WARM
        _add(table, cells, PLAIN if one["state"] == "ready" else bad)
    return table


def _reasons(workers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Why the first workers in trouble are not ready."""
    ailing = [one for one in workers if one["state"] != "ready" and one["reason"] not in ("", one["state"])]
    return [line(f"{_name(one)[1]}: {clean(one['reason'])}", DIM) for one in ailing[:NUM_EVENTS]]


def _name(worker: Mapping[str, Any]) -> tuple[int, str]:
    """So that decode-9 comes before decode-10."""
    name = clean(worker["worker_id"] or worker["address"])
    return len(name), name


def _events(load: Mapping[str, Any]) -> list[Text]:
    events = load["events"][:NUM_EVENTS]
    lines = []
    for one in events:
        detail = f": {clean(one['detail'])}" if one["detail"] else ""
        text = f"{ago(one['age_s']):>10}  {clean(one['role'])} {clean(one['worker'])} {clean(one['kind'])}{detail}"
        lines.append(line(text, BAD if one["kind"] == "lost" else PLAIN))
    return [line(""), line("events", BOLD), *lines] if lines else []
