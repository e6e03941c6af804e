"""`diptych top [URL]`: a router's load in a terminal, refreshed until q or ctrl-c.

asking thread ── Answer ──> latest, wake ──> the loop: keys, age of the picture, drawing
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from router.cli.batch import DEFAULT_URL, add_api_key
from router.cli.top.figures import ago
from router.cli.top.picture import BAD, BOLD, WIDTH, line, picture
from router.cli.top.source import Answer, LoadSource, WrongUrl

PROG = "diptych top"
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 3600.0
ROUTER_ANSWER_S = 10.0
"""How long the router may take to answer."""
LATE_S = 2.0
"""How much older than the interval a picture is when its age is shown in red."""
REDRAW_S = 0.5
"""Between two pictures without a new answer, as its age grows."""
MAX_KEY_BYTES = 64
"""Bytes read at a time from the keyboard."""
QUIT = b"qQ\x03\x04"
NO_LOAD = "what answers there is no Diptych router of this version"


class Ended(Exception):
    """A signal asks the process to end."""


class Asking:
    """Asks a router in a thread of its own, so that a slow answer holds up no key."""

    def __init__(self, source: LoadSource, interval_s: float) -> None:
        self._source, self._interval_s = source, interval_s
        self._latest = Answer(problem=f"asking {source.url} ...")
        self._load: tuple[dict[str, Any], float] | None = None
        self.wake, self._woken = os.pipe()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()  # an answer that hangs must not hold up the end

    def stop(self) -> None:
        self._stop.set()

    @property
    def problem(self) -> str:
        """Why the latest question had no answer; "" if it had."""
        return self._latest.problem

    @property
    def load(self) -> tuple[dict[str, Any], float] | None:
        """The latest load that there was, and when it came."""
        return self._load

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self._source.ask_within(ROUTER_ANSWER_S)
            if answer.load is not None:
                self._load = answer.load, time.monotonic()
            self._latest = answer
            os.write(self._woken, b".")
            self._stop.wait(self._interval_s)


def frame(asking: Asking, url: str, interval_s: float, num_lines: int, now: float) -> Group:
    """What the screen shows: a title, a problem if there is one, and the latest picture."""
    title = line(f"diptych top   {url}   {time.strftime('%H:%M:%S')}   q: end", BOLD)
    if asking.load is None:
        return Group(title, line(""), line(_sentence(asking.problem), BAD))
    load, came_at = asking.load
    age_s = now - came_at
    warnings = [line(_sentence(asking.problem), BAD)] if asking.problem else []
    if warnings or age_s > interval_s + LATE_S:
        warnings.append(line(f"What you see is from {ago(age_s)}.", BAD))
    return Group(title, *warnings, drawn(load, max(1, num_lines - 1 - len(warnings))))


def drawn(load: dict[str, Any], num_lines: int = 0) -> Group:
    """The picture, or a line that says that this is no load of a router."""
    try:
        return picture(load, num_lines)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Group(line(_sentence(NO_LOAD), BAD))


@contextmanager
def keyboard() -> Iterator[int | None]:
    """The file descriptor of the keyboard, if there is one, which gives each key at once. Signals raise Ended."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before: Any = None if keys is None else termios.tcgetattr(keys)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a background script's children ignore the first
    handlers = {number: signal.signal(number, _end) for number in signals}
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a stopped process leaves its screen
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield keys
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if keys is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _is_going_on(keys: int | None, wake: int) -> bool:
    """Wait until `wake` is readable, or for REDRAW_S. Returns False when a key ends the command."""
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
    asking = Asking(source, interval_s)
    try:
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            asking.start()
            while True:
                shown = frame(asking, source.url, interval_s, console.height, time.monotonic())
                live.update(shown, refresh=True)
                if not _is_going_on(keys, asking.wake):
                    return 0
    except (KeyboardInterrupt, Ended):
        return 0
    finally:
        asking.stop()


def follow(source: LoadSource, interval_s: float, console: Console) -> int:
    """Print one picture after another, for a pipe or a file."""
    while True:
        answer = source.ask_within(ROUTER_ANSWER_S)
        shown = line(_sentence(answer.problem)) if answer.load is None else drawn(answer.load)
        console.print(line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {source.url}"), shown, "")
        time.sleep(interval_s)


def once(source: LoadSource, console: Console, *, as_json: bool) -> int:
    """Print one picture. Returns 1 when the router did not answer."""
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


def _interval(text: str) -> float:
    value = float(text)
    if not LEAST_INTERVAL_S <= value <= MOST_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is refused: {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Shows a router's load: throughput, times, pools, classes, plan and workers. q or ctrl-c ends it.",
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"of the router (default {DEFAULT_URL})")
    parser.add_argument("--model", default="", metavar="NAME", help="of several models, show this one alone")
    parser.add_argument("--once", action="store_true", help="print one picture as text, and end")
    parser.add_argument("--json", action="store_true", help="print the answer of /load as JSON, and end")
    parser.add_argument(
        "--interval-s", type=_interval, default=1.0, metavar="X", help="seconds between questions (default 1)"
    )
    add_api_key(parser)
    parser.add_argument(
        "--ca-file", default="", metavar="FILE", help="trust the certificates in this PEM file, not the system's"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when there was no answer to print, 2 for refused arguments."""
    arguments = _parser().parse_args(argv)
    try:
        source = LoadSource.of(arguments.url, arguments.api_key, arguments.ca_file, arguments.model)
    except WrongUrl as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
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
