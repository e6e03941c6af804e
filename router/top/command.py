"""`diptych top [URL]`: a router's load in a terminal, refreshed until q or ctrl-c.

asking thread ── Answer ──> latest, wake ──> the loop: keys, age of the picture, drawing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from router.batch.client_flags import DEFAULT_URL, add_api_key
from router.top.figures import ago
from router.top.picture import BAD, BOLD, WIDTH, Line, picture
from router.top.screen import Ended, Screen
from router.top.source import Answer, LoadSource, WrongUrl

PROG = "diptych top"
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 3600.0
ROUTER_ANSWER_S = 10.0
"""How long the router may take to answer."""
LATE_S = 2.0
"""How much older than the interval a picture is when its age is shown in red."""
REDRAW_S = 0.5
"""Between two pictures without a new answer, as its age grows."""
NO_LOAD = "what answers there is no Diptych router of this version"


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


def frame(asking: Asking, url: str, interval_s: float, num_lines: int, now: float) -> list[Line]:
    """What the screen shows: a title, a problem if there is one, and the latest picture."""
    title = f"diptych top   {url}   {time.strftime('%H:%M:%S')}   q: end"
    if asking.load is None:
        return [Line(title, BOLD), Line(""), Line(_sentence(asking.problem), BAD)]
    load, came_at = asking.load
    age_s = now - came_at
    said = [Line(_sentence(asking.problem), BAD)] if asking.problem else []
    if said or age_s > interval_s + LATE_S:
        said.append(Line(f"What you see is from {ago(age_s)}.", BAD))
    return [Line(title, BOLD), *said, *drawn(load, max(1, num_lines - 1 - len(said)))]


def drawn(load: dict[str, Any], num_lines: int = 0) -> list[Line]:
    """The picture, or a line that says that this is no load of a router."""
    try:
        return picture(load, num_lines)
    except (KeyError, TypeError, ValueError, AttributeError):
        return [Line(f"{NO_LOAD[0].upper()}{NO_LOAD[1:]}.", BAD)]


def watch(source: LoadSource, interval_s: float, *, styled: bool) -> int:
    """Show the load until a key or a signal ends it."""
    asking = Asking(source, interval_s)
    try:
        with Screen(styled=styled) as screen:
            asking.start()
            while True:
                screen.draw(frame(asking, source.url, interval_s, screen.size.lines, time.monotonic()))
                if not screen.wait(asking.wake, REDRAW_S):
                    return 0
    except (KeyboardInterrupt, Ended):
        return 0
    finally:
        asking.stop()


def follow(source: LoadSource, interval_s: float) -> int:
    """Print one picture after another, for a pipe or a file."""
    while True:
        answer = source.ask_within(ROUTER_ANSWER_S)
        lines = [Line(_sentence(answer.problem))] if answer.load is None else drawn(answer.load)
        print(time.strftime("%Y-%m-%d %H:%M:%S"), source.url)
        print(_text(lines), end="\n\n", flush=True)
        time.sleep(interval_s)


def once(source: LoadSource, *, as_json: bool) -> int:
    """Print one picture. Returns 1 when the router did not answer."""
    answer = source.ask_within(ROUTER_ANSWER_S)
    if answer.load is None:
        print(f"{PROG}: {source.url}: {answer.problem}", file=sys.stderr)
        return 1
    print(json.dumps(answer.load, indent=2) if as_json else _text(drawn(answer.load)))
    return 0


def _text(lines: Sequence[Line]) -> str:
    return "\n".join(line.shown(2 * WIDTH, styled=False) for line in lines)


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
        if arguments.once or arguments.json:
            return once(source, as_json=arguments.json)
        if not sys.stdout.isatty():
            return follow(source, arguments.interval_s)
        styled = "NO_COLOR" not in os.environ and os.environ.get("TERM", "") != "dumb"
        return watch(source, arguments.interval_s, styled=styled)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # who read it has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
