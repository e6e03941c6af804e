"""Process that compiles grammars on trial. It has no threads and forks a child for each grammar.

    Order ──stdin──> this process, which has the vocabulary ──fork──> a child: bounded memory, bounded time
    Report <──stdout──┘ <── the child's report, through a pipe, or the signal that killed it ──┘

A fork takes milliseconds, and the vocabulary survives the death of a child. `GrammarChecks` starts this process and
sends it orders. The process ends at the end of its standard input.

Workers submit grammars. The router's program (`router/text/grammar_writer.py`) passes a writer to `main`: the router
submits format specifications, and the child first writes the grammar from them. The router process does not parse a
client's patterns and rules. It reads schemas of tool arguments only after a child has accepted them, in a thread, for
formats whose scanner needs them. The scanner then compares values with these schemas on the event loop, within
`MAX_COMPARISON_STEPS` of `router/text/schema/shapes.py`; patterns in these schemas are compiled there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import llguidance
import msgspec

from common.grammar.vocabulary import MAX_PROBLEM_CHARS, build_vocabulary, compile_grammar

MAX_BYTES = 128 * 2**20
"""Memory limit of compiling one grammar. A schema of 2,000 members takes 20 MiB."""
WALL_S = 15.0
"""Wall-clock limit of a child. One that exceeds it had too little CPU time to judge its grammar."""
POLL_S = 0.5
"""Interval between checks for children that exceed `WALL_S`."""
LENGTH_BYTES = 4
"""Size of the length prefix of a message."""
READ_BYTES = 65_536
"""Maximum bytes per read from a pipe: its usual capacity."""

Write = Callable[[str], str]
"""Writes a grammar from the text of an order. Raises ValueError; the client sees its message."""


class TokenSpace(msgspec.Struct, frozen=True):
    """First message to this process: path of the tokenizer, end tokens, and size of the logits."""

    tokenizer: str
    ends: tuple[int, ...]
    vocab_size: int


class Order(msgspec.Struct, frozen=True):
    """Request to compile `text`, or the grammar that the writer makes of it.

    Writing and compiling may each take `cpu_s` seconds of CPU time, at `niceness`.
    """

    number: int
    text: str
    cpu_s: float
    niceness: int


class Report(msgspec.Struct, frozen=True):
    """Result of an order.


    `outcome` is one of good, bad (`problem` is the reason), slow, large (out of memory or stack), late (the child was
    killed before it could report) and broken (`problem` is the source line of the writer's error). The child used
    `num_bytes` of memory and `cpu_s` of CPU time. `grammar` is the grammar that the writer made.
    """

    number: int
    outcome: str
    problem: str = ""
    grammar: str = ""
    num_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Child:
    order: Order
    pid: int
    pipe: int
    until: float
    report: bytearray = field(default_factory=bytearray)


def send(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """Return one message, or b"" at the end of the stream."""
    length = int.from_bytes(_read(stream, LENGTH_BYTES), "big")
    return _read(stream, length)


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        part = stream.read(num_bytes - len(found))
        if not part:
            return b""
        found += part
    return bytes(found)


class _Compiler:
    """Reads `orders` until the stream ends, and writes a report on each to `reports`."""

    def __init__(
        self, vocabulary: llguidance.LLTokenizer, write: Write | None, orders: BinaryIO, reports: BinaryIO
    ) -> None:
        self._vocabulary, self._write, self._orders, self._reports = vocabulary, write, orders, reports
        self._children: dict[int, _Child] = {}

    def run(self) -> None:
        while True:
            orders = self._orders.fileno()
            ready, _, _ = select.select([orders, *self._children], [], [], POLL_S)
            if orders in ready:
                body = receive(self._orders)
                if not body:
                    break
                self._begin(msgspec.msgpack.decode(body, type=Order))
            for child in [self._children[pipe] for pipe in ready if pipe != orders]:
                if part := os.read(child.pipe, READ_BYTES):
                    child.report.extend(part)
                else:
                    self._end(child)
            for child in [child for child in self._children.values() if child.until < time.monotonic()]:
                os.kill(child.pid, signal.SIGKILL)  # the pipe then ends, and `_end` writes the report
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)

    def _begin(self, order: Order) -> None:
        pipe, written = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(pipe)
            _compile(self._vocabulary, self._write, order, written)
        os.close(written)
        self._children[pipe] = _Child(order, pid, pipe, time.monotonic() + WALL_S)

    def _end(self, child: _Child) -> None:
        """Write the report of a child that has finished or died."""
        os.close(child.pipe)
        del self._children[child.pipe]
        _, status, used = os.wait4(child.pid, 0)
        number, cpu_s = child.order.number, used.ru_utime + used.ru_stime
        with contextlib.suppress(msgspec.DecodeError):  # the child died before it had written the whole report
            send(self._reports, msgspec.msgpack.decode(child.report, type=Report))
            return
        how = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        outcome = {signal.SIGPROF: "slow", signal.SIGKILL: "late"}.get(signal.Signals(how), "large") if how else "large"
        send(self._reports, Report(number, outcome, cpu_s=cpu_s))


def _compile(vocabulary: llguidance.LLTokenizer, write: Write | None, order: Order, pipe: int) -> None:
    """Write and compile the grammar, send the report, and exit. Runs in the child."""
    try:
        _bound(order)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, grammar, problem = _written(write, order.text)
        if not problem:
            signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
            _, problem = compile_grammar(vocabulary, grammar)
            outcome = "bad" if problem else "good"
        used = resource.getrusage(resource.RUSAGE_SELF)
        num_bytes = (used.ru_maxrss - resident) * (1 if sys.platform == "darwin" else 1024)
        written = "" if problem or write is None else grammar
        report = Report(order.number, outcome, problem, written, num_bytes, used.ru_utime + used.ru_stime)
        with os.fdopen(pipe, "wb", closefd=False) as reports:
            reports.write(msgspec.msgpack.encode(report))
    finally:
        os._exit(0)


def _written(write: Write | None, text: str) -> tuple[str, str, str]:
    """Return the outcome of writing, the grammar, and the problem or ""."""
    if write is None:
        return "good", text, ""
    try:
        return "good", write(text), ""
    except RecursionError:
        return "bad", "", "nested too deeply"
    except ValueError as error:
        return "bad", "", str(error)[:MAX_PROBLEM_CHARS]
    except MemoryError:
        raise
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        return "broken", "", f"{type(error).__name__} in {frame.f_code.co_filename}, line {line}"


def _bound(order: Order) -> None:
    """Limit CPU time (ends in SIGPROF) and memory (ends in SIGABRT or SIGSEGV) of this child."""
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints to stderr when it runs out of memory
    os.nice(order.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # without /proc, only the library's limits bound memory
        with open("/proc/self/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as first_to_die:
        first_to_die.write("1000")


def main(write: Write | None = None) -> None:
    """Serve orders from standard input until it ends. Without `write`, the text of an order is the grammar."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the input
    orders, reports = os.fdopen(0, "rb", buffering=0, closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library may print into the reports
    body = receive(orders)
    if body:
        model = msgspec.msgpack.decode(body, type=TokenSpace)
        vocabulary = build_vocabulary(Path(model.tokenizer), model.ends, model.vocab_size)
        gc.freeze()  # children share the pages of the vocabulary
        with contextlib.suppress(BrokenPipeError):
            _Compiler(vocabulary, write, orders, reports).run()


if __name__ == "__main__":
    main()
