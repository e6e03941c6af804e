"""`diptych batch IN OUT`: sends every request of a file, and writes each answer when it is there.

A run that is stopped, or crashes, goes on with the same command: what OUT has an answer to is not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

from tqdm import tqdm

from router.api.batches import (
    PATHS,
    BadBatch,
    BatchRequest,
    BatchResult,
    BatchSender,
    Refused,
    SendSettings,
    check_requests,
    read_requests,
    take_up,
)
from router.cli.client_flags import DEFAULT_URL, add_api_key

PROG = "diptych batch"
MAX_CONCURRENCY = 10_000
"""Each has a connection of its own."""
DAY_S = 86_400.0


@dataclass
class Run:
    """A run's output, and how far it is."""

    output: BinaryIO
    bar: tqdm[NoReturn]
    num_good: int = 0
    num_refused: int = 0
    num_unanswered: int = 0
    signals: list[int] = field(default_factory=list)

    def write(self, result: BatchResult) -> None:
        self.output.write(result.line())
        self.output.flush()
        self.num_good += result.is_good
        self.num_refused += bool(result.status) and not result.is_good
        self.num_unanswered += not result.status
        self.bar.update()
        if self.num_refused or self.num_unanswered:
            self.bar.set_postfix(refused=self.num_refused, unanswered=self.num_unanswered)

    @property
    def summary(self) -> str:
        parts = [f"{self.num_good:,} answered"]
        parts += [f"{self.num_refused:,} refused"] * bool(self.num_refused)
        parts += [f"{self.num_unanswered:,} without an answer"] * bool(self.num_unanswered)
        return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when all is answered well, 1 when something is not, 2 for refused files or arguments, or 128 and
    the number of the signal that stopped it."""
    arguments = _parser().parse_args(argv)
    source, target = Path(arguments.input), Path(arguments.output)
    try:
        total = check_requests(source)
        with ExitStack() as files:
            output = files.enter_context(_locked(target))
            answered, is_new_file = take_up(target)
            if is_new_file:
                output = files.enter_context(_locked(target))
            return _run(arguments, source, output, total, answered)
    except (BadBatch, Refused) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, source: Path, output: BinaryIO, total: int, answered: set[str]) -> int:
    if answered:
        print(f"{PROG}: {arguments.output} answers {len(answered):,} of them already", file=sys.stderr)
    requests = (request for request in read_requests(source) if request.custom_id not in answered)
    bar: tqdm[NoReturn] = tqdm(total=total, initial=min(total, len(answered)), unit="req", disable=None, desc="batch")
    run = Run(output, bar)
    settings = SendSettings(
        arguments.url.rstrip("/"),
        _headers(arguments),
        arguments.concurrency,
        arguments.patience_s,
        arguments.answer_s,
        arguments.service_tier,
    )
    try:
        asyncio.run(_send(BatchSender(settings, run.write), requests, run))
    except asyncio.CancelledError:
        number = run.signals[0] if run.signals else signal.SIGINT
        bar.close()
        print(f"{PROG}: stopped: {run.summary}; the same command goes on", file=sys.stderr)
        return 128 + number
    finally:
        bar.close()
    print(f"{PROG}: {run.summary}", file=sys.stderr)
    return 0 if not run.num_refused and not run.num_unanswered else 1


async def _send(sender: BatchSender, requests: Iterator[BatchRequest], run: Run) -> None:
    """Send all, or until a signal."""
    task = asyncio.ensure_future(sender.run(requests))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        run.signals.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await task


def _locked(path: Path) -> BinaryIO:
    """The output, which this run alone writes. Raises BadBatch."""
    try:
        output = path.open("ab")
    except OSError as error:
        raise BadBatch(f"{path}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        output.close()
        raise BadBatch(f"{path}: another run writes it") from error
    return output


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    if arguments.request_class:
        headers["X-Request-Class"] = arguments.request_class
    return headers


def _number(least: float, most: float, *, whole: bool = False) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = int(text) if whole else float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is refused: {least:g} to {most:g}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=(
            "Sends every request of a file, and writes each answer to another when it is there. IN has a JSON object a "
            'line, as OpenAI\'s batches have: {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}. '
            "A run that was stopped goes on with the same command. Busy and failing servers are asked again."
        ),
        epilog=f"Possible urls: {', '.join(PATHS)}. Answers come in the order in which they are ready.",
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="IN", help="requests, a JSON object a line")
    parser.add_argument("output", metavar="OUT", help="results, a JSON object a line; new ones are added")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the router, or another server (default {DEFAULT_URL})")
    parser.add_argument(
        "--concurrency",
        type=_number(1, MAX_CONCURRENCY, whole=True),
        default=32,
        metavar="N",
        help="requests under way at once (default 32)",
    )
    add_api_key(parser)
    parser.add_argument(
        "--service-tier",
        default="flex",
        metavar="NAME",
        help="of requests that name none: flex is the class batch, where the router has it (default flex; '' for none)",
    )
    parser.add_argument("--request-class", default="", metavar="NAME", help="the router's class for all requests")
    parser.add_argument(
        "--patience-s",
        type=_number(1, 30 * DAY_S),
        default=DAY_S,
        metavar="X",
        help="how long a request may take with all its tries (default 86400)",
    )
    parser.add_argument(
        "--answer-s",
        type=_number(1, DAY_S),
        default=3600.0,
        metavar="X",
        help="how long one answer may take (default 3600)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
