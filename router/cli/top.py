"""`diptych top [URL]`: show the load of a router in the terminal until q or Ctrl-C.

polling thread ── Answer ──> latest, wake ──> main loop: keyboard, age of the data, drawing
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.client_flags import top_parser
from router.cli.models.table import ago, clean, duration
from router.cli.router_client import NO_LOAD, ROUTER_ANSWER_S, Answer, LoadSource, source_of

NONE = "-"
SIZES = ("B", "kB", "MB", "GB", "TB")
WIDTH = 80
"""Columns of the full output; a narrower terminal truncates lines."""
NUM_EVENTS = 5
"""Maximum number of events, and of workers with a problem, that are shown."""
MIN_WORKER_LINES = 7
"""Minimum number of lines of the worker table, including its header."""
TIMES = (
    ("First token (TTFT)", "ttft", "ttft"),
    ("Later token (TPOT)", "tpot", "tpot"),
    ("Between tokens", "itl", ""),
    ("Wait", "queue", ""),
    ("KV transfer", "transfer", ""),
    ("KV not hidden", "exposed_transfer", ""),
)
STAGES = {"queue": "waiting", "prefill": "prompt", "transfer": "KV transfer", "decode": "answer"}

PLAIN, BOLD, DIM, WARM, BAD = "", "bold", "dim", "yellow", "red"

Part = Text | Table
"""A line of text, or a table with one line per row and header."""
PROG = "diptych top"
LATE_S = 2.0
"""Delay beyond the interval after which the age of the data is shown in red."""
REDRAW_S = 0.5
"""Redraw interval without a new answer."""
MAX_KEY_BYTES = 64
"""Maximum number of bytes per read from the keyboard."""
QUIT = b"qQ\x03\x04"


def number(value: float) -> str:
    """Format with about three digits: 0.42, 7.5, 312, 4,210, 41.2k, 3.1M."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    if value >= 10 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(value: float) -> str:
    """Format bytes with decimal units."""
    power = 0
    while value >= 1000 and power < len(SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f} {SIZES[power]}" if power == 0 or value >= 100 else f"{value:.1f} {SIZES[power]}"


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal just below 100 %."""
    return f"{100 * share:.1f} %" if 0.99 < share < 0.9995 else f"{100 * share:.0f} %"


def percentile(times: Mapping[str, float], share: str) -> str:
    """Format one of `Percentiles` by its name."""
    return duration(times[share]) if times["num"] else NONE


def picture(load: Mapping[str, Any], num_lines: int = 0) -> Group:
    """Draw a load, the most important lines first. The workers are limited to `num_lines` in total; 0 for no limit."""
    above: list[Part] = [*_now(load), line(""), _times(load), line("")]
    workers = sorted(load["workers"], key=lambda one: (one["state"] == "ready", one["role"] != "prefill", _name(one)))
    below: list[Part] = [*_reasons(workers), *_classes(load), *_plan(load), *_events(load)]
    shown = workers
    if num_lines:
        room = max(MIN_WORKER_LINES, num_lines - _height(above) - _height(below)) - 1
        if room < len(workers):
            shown = workers[: room - 1]
            below.insert(
                0, line(f"... and {len(workers) - len(shown):,} more workers; enlarge the window to show them", DIM)
            )
    return Group(*above, _workers(shown, several=len(load["models"]) > 1), *below)


def line(text: str, style: str = PLAIN) -> Text:
    """Return a line without control characters that is truncated at the edge of the terminal."""
    return Text(clean(text), style, no_wrap=True, overflow="ellipsis")


def _height(parts: Sequence[Part]) -> int:
    return sum(part.row_count + 1 if isinstance(part, Table) else 1 for part in parts)


def _table(names: Mapping[str, int]) -> Table:
    """Return an empty table with columns by name and width. Numbers are right-aligned."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style=BOLD)
    for place, (name, width) in enumerate(names.items()):
        is_text = place == 0 or name in ("role", "state", "model")
        table.add_column(Text(name), justify="left" if is_text else "right", width=width or None, no_wrap=True)
    return table


def _add(table: Table, cells: Sequence[str], style: str = PLAIN) -> None:
    """Add a row of plain text without control characters. Rich would interpret markup in a string."""
    table.add_row(*(Text(clean(cell)) for cell in cells), style=style)


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
            PLAIN if all(one["ready"] or one.get("state") for one in models) else WARM,
        ),
        line(f"Requests    {number(rates['requests_per_s'])}/s{failed}", WARM if failed else PLAIN),
        line(
            f"In flight   {load['server_load']:,}: "
            + ", ".join(f"{count:,} {STAGES.get(name, name)}" for name, count in stages.items())
        ),
        line(f"Tokens      {number(rates['output_tokens_per_s'])}/s output, {number(prompt)}/s prompt{hits}"),
        line(f"KV moved    {size(rates['transfer_bytes_per_s'])}/s in {number(rates['transfers_per_s'])} transfers/s"),
        *_pools(load),
    ]


def _model(one: Mapping[str, Any]) -> str:
    away = f", {one['state']}" if one.get("state") else "" if one["ready"] else ", no ready worker"
    return f"{one['id']} ({one['max_model_len']:,} tokens{away})"


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
    """Draw the request classes, unless there is one without goals."""
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
        _add(table, (one["name"], *counts, *shares), BAD if missed else PLAIN)
    return [line(""), table]


def _plan(load: Mapping[str, Any]) -> list[Text]:
    plan = load["plan"]
    if plan is None:
        return []
    lines = [line(""), line("plan", BOLD)]
    if plan["unmet"]:
        lines.append(line(f"The goals cannot be met: {plan['unmet']}", BAD))
    if plan["held"]:
        lines.append(line(f"The plan is on hold: {plan['held']}", WARM))
    for role, pool in plan["pools"].items():
        text = f"{role}: {pool['present']} present, {pool['wanted']} wanted, {pool['needed']} needed. "
        lines.append(line(text + pool["reason"], WARM if pool["present"] < pool["wanted"] else PLAIN))
    return lines


def _workers(workers: Sequence[Mapping[str, Any]], *, several: bool) -> Table:
    columns = {"worker": 20, "role": 7, "state": 9, "requests": 8, "queued": 7, "wait": 7, "KV used": 7, "tok/s": 7}
    table = _table(columns | ({"model": 0} if several else {}))
    for one in workers:
        used = _used([one])
        cells = [_name(one)[1], one["role"], one["state"], f"{one['num_requests']:,}"]
        cells += [number(one["num_queued_tokens"]), duration(one["wait_s"] * 1e3)]
        cells += [NONE if used is None else percent(used), number(one["tokens_per_s"])]
        cells += [one.get("model", "")] if several else []
        bad = BAD if one["state"] in ("dead", "unknown") else WARM
        _add(table, cells, PLAIN if one["state"] == "ready" else bad)
    return table


def _reasons(workers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Draw why workers are not ready, or not paired."""
    limited = [one for one in workers if one["reason"] not in ("", one["state"])]
    return [line(f"{_name(one)[1]}: {one['reason']}", DIM) for one in limited[:NUM_EVENTS]]


def _name(worker: Mapping[str, Any]) -> tuple[int, str]:
    """Sort key that orders decode-9 before decode-10."""
    name = worker["worker_id"] or worker["address"]
    return len(name), name


def _events(load: Mapping[str, Any]) -> list[Text]:
    events = load["events"][:NUM_EVENTS]
    lines = []
    for one in events:
        detail = f": {one['detail']}" if one["detail"] else ""
        text = f"{ago(one['age_s']):>10}  {one['role']} {one['worker']} {one['kind']}{detail}"
        lines.append(line(text, BAD if one["kind"] == "lost" else PLAIN))
    return [line(""), line("events", BOLD), *lines] if lines else []


class Ended(Exception):
    """A signal stops the process."""


class Poller:
    """Polls a router in its own thread, so that a slow answer does not block the keyboard."""

    def __init__(self, source: LoadSource, interval_s: float) -> None:
        self._source, self._interval_s = source, interval_s
        self._latest = Answer(problem=f"connecting to {source.url} ...")
        self._load: tuple[dict[str, Any], float] | None = None
        self.wake, self._woken = os.pipe()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()  # a pending answer must not delay the exit

    def stop(self) -> None:
        self._stop.set()

    @property
    def problem(self) -> str:
        """Problem of the latest request, or ""."""
        return self._latest.problem

    @property
    def load(self) -> tuple[dict[str, Any], float] | None:
        """The latest load and the time of its arrival."""
        return self._load

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self._source.ask_within(ROUTER_ANSWER_S)
            if answer.load is not None:
                self._load = answer.load, time.monotonic()
            self._latest = answer
            os.write(self._woken, b".")
            self._stop.wait(self._interval_s)


def frame(poller: Poller, url: str, interval_s: float, num_lines: int, now: float) -> Group:
    """Draw the screen: a title, the current problem if any, and the latest load."""
    title = line(f"diptych top   {url}   {time.strftime('%H:%M:%S')}   q: quit", BOLD)
    if poller.load is None:
        return Group(title, line(""), line(_sentence(poller.problem), BAD))
    load, came_at = poller.load
    age_s = now - came_at
    warnings = [line(_sentence(poller.problem), BAD)] if poller.problem else []
    if warnings or age_s > interval_s + LATE_S:
        warnings.append(line(f"This data is from {ago(age_s)}.", BAD))
    return Group(title, *warnings, drawn(load, max(1, num_lines - 1 - len(warnings))))


def drawn(load: dict[str, Any], num_lines: int = 0) -> Group:
    """Draw the load, or an error line if it is not the load of a router."""
    try:
        return picture(load, num_lines)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Group(line(_sentence(NO_LOAD), BAD))


@contextmanager
def keyboard() -> Iterator[int | None]:
    """Yield the file descriptor of the keyboard in unbuffered mode, or None. Signals raise Ended."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before: Any = None if keys is None else termios.tcgetattr(keys)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # background processes of a script ignore the first
    handlers = {number: signal.signal(number, _end) for number in signals}
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # keep the screen
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield keys
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if keys is not None:
            with suppress(termios.error):  # the terminal may be closed
                termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _continues(keys: int | None, wake: int) -> bool:
    """Wait until `wake` is readable or REDRAW_S is over. Returns False if a key ends the command."""
    watched = [wake] if keys is None else [wake, keys]
    ready, _, _ = select.select(watched, [], [], REDRAW_S)
    if wake in ready:
        os.read(wake, MAX_KEY_BYTES)
    if keys is None or keys not in ready:
        return True
    pressed = os.read(keys, MAX_KEY_BYTES)
    return bool(pressed) and not any(key in QUIT for key in pressed)


def watch(source: LoadSource, interval_s: float, console: Console) -> int:
    """Show the load until a key or a signal ends it."""
    poller = Poller(source, interval_s)
    try:
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            poller.start()
            while True:
                shown = frame(poller, source.url, interval_s, console.height, time.monotonic())
                live.update(shown, refresh=True)
                if not _continues(keys, poller.wake):
                    return 0
    except (KeyboardInterrupt, Ended):
        return 0
    finally:
        poller.stop()


def follow(source: LoadSource, interval_s: float, console: Console) -> int:
    """Print the load repeatedly, for a pipe or a file."""
    while True:
        answer = source.ask_within(ROUTER_ANSWER_S)
        shown = line(_sentence(answer.problem)) if answer.load is None else drawn(answer.load)
        console.print(line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {source.url}"), shown, "")
        time.sleep(interval_s)


def once(source: LoadSource, console: Console, *, as_json: bool) -> int:
    """Print the load once. Returns 1 if the router does not answer."""
    answer = source.ask_within(ROUTER_ANSWER_S)
    if answer.load is None:
        print(f"{PROG}: {source.url}: {answer.problem}", file=sys.stderr)
        return 1
    if as_json:
        console.print_json(data=answer.load)
    else:
        console.print(drawn(answer.load))
    return 0


def _sentence(problem: str) -> str:
    return f"{problem[:1].upper()}{problem[1:]}." if problem and not problem.endswith(".") else problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, 1 without an answer, or 2 for invalid arguments."""
    arguments = top_parser().parse_args(argv)
    found = source_of(arguments, PROG)
    if found is None:
        return 2
    source = replace(found, model=arguments.model)
    try:
        console = Console(width=None if sys.stdout.isatty() else 2 * WIDTH)
        if arguments.once or arguments.json:
            return once(source, console, as_json=arguments.json)
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            return watch(source, arguments.interval_s, console)
        return follow(source, arguments.interval_s, console)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
