"""`diptych batch IN OUT`: send all requests of a file and write each answer as it arrives.

After an interruption, the same command resumes the run: requests with an answer in OUT are not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from common.machine import write_failure
from router.api.batches import (
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
from router.cli.client_flags import batch_parser

PROG = "diptych batch"


class OutputError(Exception):
    """An answer cannot be written. The message has the path."""


@dataclass
class Run:
    """Output and progress of a run. `output` is unbuffered, so that closing it cannot fail."""

    path: Path
    output: FileIO
    bar: tqdm[NoReturn]
    num_good: int = 0
    num_refused: int = 0
    num_unanswered: int = 0
    signals: list[int] = field(default_factory=list)

    def write(self, result: BatchResult) -> None:
        """Write a result as a line. Raises OutputError."""
        line = rest = result.line()
        try:
            while rest:
                rest = rest[self.output.write(rest) :]
        except OSError as error:
            raise OutputError(write_failure(self.path, error, len(line))) from error
        self.num_good += result.is_good
        self.num_refused += bool(result.status) and not result.is_good
        self.num_unanswered += not result.status
        self.bar.update()
        if self.num_refused or self.num_unanswered:
            self.bar.set_postfix(rejected=self.num_refused, unanswered=self.num_unanswered)

    @property
    def summary(self) -> str:
        parts = [f"{self.num_good:,} answered"]
        parts += [f"{self.num_refused:,} rejected"] * bool(self.num_refused)
        parts += [f"{self.num_unanswered:,} unanswered"] * bool(self.num_unanswered)
        return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns exit status 0 if all requests succeeded, 1 if some failed or an answer cannot be written, 2 for invalid
    files or arguments, or 128 plus the number of the signal that stopped it.
    """
    arguments = batch_parser().parse_args(argv)
    source, target = Path(arguments.input), Path(arguments.output)
    try:
        total = check_requests(source)
        with ExitStack() as files:
            output = files.enter_context(_locked(target))
            try:
                answered, is_new_file = take_up(target)
            except OSError as error:
                raise BadBatch(write_failure(target, error)) from error
            if is_new_file:
                output = files.enter_context(_locked(target))
            return _run(arguments, source, output, total, answered)
    except (BadBatch, Refused) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, source: Path, output: FileIO, total: int, answered: set[str]) -> int:
    if answered:
        print(f"{PROG}: {arguments.output} already has {len(answered):,} answers", file=sys.stderr)
    requests = (request for request in read_requests(source) if request.custom_id not in answered)
    bar: tqdm[NoReturn] = tqdm(total=total, initial=min(total, len(answered)), unit="req", disable=None, desc="batch")
    run = Run(Path(arguments.output), output, bar)
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
        print(f"{PROG}: stopped: {run.summary}; run the same command to resume", file=sys.stderr)
        return 128 + number
    except OutputError as error:
        bar.close()
        print(f"{PROG}: {error}; {run.summary}; run the same command to resume", file=sys.stderr)
        return 1
    finally:
        bar.close()
    print(f"{PROG}: {run.summary}", file=sys.stderr)
    return 0 if not run.num_refused and not run.num_unanswered else 1


async def _send(sender: BatchSender, requests: Iterator[BatchRequest], run: Run) -> None:
    """Send all requests, or until a signal."""
    task = asyncio.ensure_future(sender.run(requests))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        run.signals.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await task


def _locked(path: Path) -> FileIO:
    """Open and lock the output. Raises BadBatch if it is not writable or another run has locked it."""
    try:
        output = path.open("ab", buffering=0)
    except OSError as error:
        raise BadBatch(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        output.close()
        raise BadBatch(f"another run is writing {path}") from error
    return output


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    if arguments.request_class:
        headers["X-Request-Class"] = arguments.request_class
    return headers


if __name__ == "__main__":
    sys.exit(main())
