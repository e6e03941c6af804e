"""The process that compiles grammars on trial. It has no threads, and forks a child for each grammar.

    Order ──stdin──> this process, which holds the vocabulary ──fork──> a child: bounded memory, bounded time
    Report <──stdout──┘ <── the child's report, through a pipe, or the signal that killed it ──┘

A child costs milliseconds, and after its death this process still holds the vocabulary. `GrammarChecks` starts this
process and sends it orders. It ends when its standard input does.
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
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import llguidance
import msgspec

from common.grammar.vocabulary import build_vocabulary, compile_grammar

MAX_BYTES = 128 * 2**20
"""Memory that compiling one grammar may take. A schema of two thousand members takes 20 MiB."""
WALL_S = 15.0
"""A child that takes longer had too little of the machine to judge its grammar."""
POLL_S = 0.5
"""Between two looks for children that take too long."""
LENGTH_BYTES = 4
"""Before each message between this process and the compiling one."""


class TokenSpace(msgspec.Struct, frozen=True):
    """The first message to this process: the tokenizer's file, the end tokens, and the size of the logits."""

    tokenizer: str
    ends: tuple[int, ...]
    vocab_size: int


class Order(msgspec.Struct, frozen=True):
    """Asks to compile `grammar` in at most `cpu_s` seconds of processor time, at `niceness`."""

    number: int
    grammar: str
    cpu_s: float
    niceness: int


class Report(msgspec.Struct, frozen=True):
    """The result of an order.

    `outcome` is one of good, bad (`problem` says why), slow, large (out of memory or of stack) and late (the child was
    killed before it could tell). It took `num_bytes` of memory and `cpu_s` of processor time.
    """

    number: int
    outcome: str
    problem: str = ""
    num_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Child:
    order: Order
    pid: int
    pipe: int
    until: float


def send(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """One message's bytes, or b"" at the end of the stream."""
    length = int.from_bytes(_read(stream, LENGTH_BYTES), "big")
    return _read(stream, length)


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = stream.read(num_bytes - len(found))
        if not part:
            return b""
        found += part
    return found


class _Compiler:
    """Reads `orders` until they end, and writes a report of each to `reports`."""

    def __init__(self, vocabulary: llguidance.LLTokenizer, orders: BinaryIO, reports: BinaryIO) -> None:
        self._vocabulary, self._orders, self._reports = vocabulary, orders, reports
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
                self._end(child)
            for child in [child for child in self._children.values() if child.until < time.monotonic()]:
                os.kill(child.pid, signal.SIGKILL)  # its pipe ends then, and `_end` reports it
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)

    def _begin(self, order: Order) -> None:
        pipe, written = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(pipe)
            _compile(self._vocabulary, order, written)
        os.close(written)
        self._children[pipe] = _Child(order, pid, pipe, time.monotonic() + WALL_S)

    def _end(self, child: _Child) -> None:
        """Reports on a child that has written its report, which fits into a pipe, or died."""
        body = os.read(child.pipe, 65_536)
        os.close(child.pipe)
        del self._children[child.pipe]
        _, status, used = os.wait4(child.pid, 0)
        number, cpu_s = child.order.number, used.ru_utime + used.ru_stime
        if body:
            send(self._reports, msgspec.msgpack.decode(body, type=Report))
            return
        how = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        outcome = {signal.SIGPROF: "slow", signal.SIGKILL: "late"}.get(signal.Signals(how), "large") if how else "large"
        send(self._reports, Report(number, outcome, cpu_s=cpu_s))


def _compile(vocabulary: llguidance.LLTokenizer, order: Order, pipe: int) -> None:
    """Compiles and reports, in the child, and ends it."""
    try:
        _bound(order)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _, problem = compile_grammar(vocabulary, order.grammar)
        used = resource.getrusage(resource.RUSAGE_SELF)
        unit = 1 if sys.platform == "darwin" else 1024
        outcome, num_bytes = "bad" if problem else "good", (used.ru_maxrss - resident) * unit
        report = Report(order.number, outcome, problem, num_bytes, used.ru_utime + used.ru_stime)
        os.write(pipe, msgspec.msgpack.encode(report))
    finally:
        os._exit(0)


def _bound(order: Order) -> None:
    """Lets SIGPROF end this process when its processor time is used up, and SIGABRT or SIGSEGV when its memory is."""
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints there when it gets no memory
    os.nice(order.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # without /proc the library's own limits bound memory
        with open("/proc/self/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as first_to_die:
        first_to_die.write("1000")


def main() -> None:
    """Serves standard input until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the input
    orders, reports = os.fdopen(0, "rb", buffering=0, closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that no library prints into the reports
    body = receive(orders)
    if body:
        model = msgspec.msgpack.decode(body, type=TokenSpace)
        vocabulary = build_vocabulary(Path(model.tokenizer), model.ends, model.vocab_size)
        gc.freeze()  # so that children share the vocabulary's pages
        with contextlib.suppress(BrokenPipeError):
            _Compiler(vocabulary, orders, reports).run()


if __name__ == "__main__":
    main()
