"""Checks that a grammar compiles within its limits, in a process that can be killed.

    submit ──> quick lane: 0.1 s of CPU time ──> verdict
                              └── not enough ──> slow lane: 1 s, from the beginning ──> verdict

Slow grammars wait only for other slow ones; typical grammars take milliseconds. Each lane serves the owners of grammars
in round-robin order, so no owner waits for all grammars of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import msgspec

from common.errors import RETRY_AFTER_S, Unavailable
from common.grammar.compiler import MAX_BYTES, Order, Report, TokenSpace, receive, send
from common.model_files import ModelFiles

log = logging.getLogger(__name__)
QUICK_CPU_S, SLOW_CPU_S = 0.1, 1.0
"""CPU time limits. A schema of 2,000 optional members takes 0.4 s on a core of 2024."""
LANES = 2
"""Threads of each lane."""
QUICK_NICENESS, SLOW_NICENESS = 0, 10
"""Slow grammars yield the CPU to quick ones and to serving processes."""
MAX_PENDING = 256
"""Maximum number of grammars queued or being compiled. One owner may have half of them."""
MAX_VERDICTS, MAX_VERDICT_BYTES = 4096, 32 * 2**20
"""Maximum number of cached verdicts, and their maximum total size in bytes."""
VERDICT_BYTES = 512
"""Estimated size of a verdict without its grammar."""
COMPILER = "common.grammar.compiler"
"""Compiler module without a grammar writer."""
ANSWER_S = 60.0
"""Timeout of one check, in seconds. Exceeds process start, building the largest vocabulary, and any compilation."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check: the `problem` (or ""), and the memory and CPU time that compiling took.

    `grammar` is the grammar written from the submitted text, or "" if the text was the grammar.
    """

    problem: str
    num_bytes: int
    cpu_s: float
    grammar: str = ""

    @property
    def is_quick(self) -> bool:
        return self.cpu_s <= QUICK_CPU_S


@dataclass(frozen=True, slots=True)
class _Pending:
    """A text that waits for its verdict."""

    text: str
    owner: str
    future: Future[Verdict]


class _Lane:
    """Threads that run the jobs of several owners in round-robin order."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, owner: str, job: Callable[[], None]) -> None:
        """Queue `job` after the earlier jobs of `owner`. Between two of these, each other owner gets one job run."""
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(job)
        self._threads.submit(self._run_next)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            owner, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs
        job()


class GrammarChecks:
    """Owns the compiler process (`compiler.py`), and restarts it after it dies.

    Verdicts depend only on the text, the model and the limits, and are cached. `program` is the module to run.
    """

    def __init__(
        self,
        files: ModelFiles,
        vocab_size: int,
        *,
        program: str = COMPILER,
        quick_cpu_s: float = QUICK_CPU_S,
        slow_cpu_s: float = SLOW_CPU_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._model = TokenSpace(str(files.tokenizer), files.eos_token_ids, vocab_size)
        self._quick_cpu_s, self._slow_cpu_s, self._answer_s = quick_cpu_s, slow_cpu_s, answer_s
        self._program = program
        self._quick, self._slow = _Lane("grammar-quick"), _Lane("grammar-slow")
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._num_bytes = 0  # of verdicts
        self._pending: dict[bytes, _Pending] = {}
        self._compiler: _Compiler | None = None
        self._faults: set[str] = set()
        self._closed = False

    def start(self) -> None:
        """Start the compiler process before the first grammar arrives. Raises Unavailable."""
        self._live_compiler()

    def submit(self, text: str, *, salt: str = "", owner: str = "") -> Future[Verdict]:
        """Submit a text. The future gets the verdict, or Unavailable if the check failed. It cannot be cancelled.

        Verdicts are cached per `salt`, because response times would reveal the texts of other tenants. Texts of one
        `owner` are checked in order. Raises ValueError if the text is not valid Unicode, Unavailable if the queue is
        full.
        """
        key = hashlib.sha256(hashlib.sha256(salt.encode(errors="surrogatepass")).digest() + text.encode()).digest()
        with self._lock:
            if (known := self._verdicts.get(key)) is not None:
                self._verdicts.move_to_end(key)
                return _done(known)
            if key in self._pending:
                return self._pending[key].future
            if self._closed:
                raise Unavailable("The process is shutting down.", retry_after_s=RETRY_AFTER_S)
            self._check_capacity(owner)
            pending = self._pending[key] = _Pending(text, owner, _unfinished())
            self._quick.submit(owner, lambda: self._try_quickly(key, pending))
        return pending.future

    def _check_capacity(self, owner: str) -> None:
        """Raise Unavailable if the queue is full, in total or for one owner."""
        if len(self._pending) >= MAX_PENDING:
            raise Unavailable(f"The compile queue is full ({MAX_PENDING} grammars).", retry_after_s=RETRY_AFTER_S)
        if owner and sum(each.owner == owner for each in self._pending.values()) >= MAX_PENDING // 2:
            raise Unavailable(
                f"Too many grammars ({MAX_PENDING // 2}) of this API key are waiting to be compiled.",
                retry_after_s=RETRY_AFTER_S,
            )

    def close(self) -> None:
        """Kill the compiler process. Pending futures fail with Unavailable."""
        with self._lock:
            self._closed = True
            compiler, waiting = self._compiler, [each.future for each in self._pending.values()]
            self._pending.clear()
        self._quick.close()
        self._slow.close()
        if compiler is not None:
            compiler.kill()
            compiler.join()
        for future in waiting:
            future.set_exception(Unavailable("The process is shutting down.", retry_after_s=RETRY_AFTER_S))

    # ------------------------------------------------------------ in a lane

    def _try_quickly(self, key: bytes, pending: _Pending) -> None:
        if (report := self._report(key, pending.text, self._quick_cpu_s, QUICK_NICENESS)) is None:
            return
        if report.outcome != "slow":
            self._finish(key, report, self._quick_cpu_s)
            return
        with self._lock:
            if not self._closed:
                self._slow.submit(pending.owner, lambda: self._try_slowly(key, pending))

    def _try_slowly(self, key: bytes, pending: _Pending) -> None:
        if (report := self._report(key, pending.text, self._slow_cpu_s, SLOW_NICENESS)) is not None:
            self._finish(key, report, self._slow_cpu_s)

    def _report(self, key: bytes, text: str, cpu_s: float, niceness: int) -> Report | None:
        """Return the compiler's report, or None after failing the future of the text."""
        try:
            report = self._live_compiler().ask(text, cpu_s, niceness, self._answer_s)
        except Exception as error:  # any error must fail the waiting request
            log.warning("grammars: a check failed, its requests get status 503: %s", error)
        else:
            if report.outcome != "late":
                return report
        with self._lock:
            pending = self._pending.pop(key, None)
        if pending is not None:
            what = "The grammar could not be checked: this machine is too busy, or has no memory."
            pending.future.set_exception(Unavailable(what, retry_after_s=RETRY_AFTER_S))
        return None

    def _finish(self, key: bytes, report: Report, cpu_s: float) -> None:
        if report.outcome == "broken":
            self._log_fault(report.problem)
        verdict = Verdict(_problem(report, cpu_s), report.num_bytes, report.cpu_s, report.grammar)
        with self._lock:
            self._verdicts[key] = verdict
            self._num_bytes += _bytes_of(verdict)
            while len(self._verdicts) > MAX_VERDICTS or self._num_bytes > MAX_VERDICT_BYTES:
                self._num_bytes -= _bytes_of(self._verdicts.popitem(last=False)[1])
            pending = self._pending.pop(key, None)
        if pending is not None:
            pending.future.set_result(verdict)

    def _log_fault(self, place: str) -> None:
        """Log a fault of the writer once per source line: clients may cause it again and again."""
        with self._lock:
            if place in self._faults:
                return
            self._faults.add(place)
        log.error("grammars: the writer failed (please report it), its requests get status 400: %s", place)

    def _live_compiler(self) -> _Compiler:
        with self._lock:
            if self._closed:
                raise Unavailable("The process is shutting down.", retry_after_s=RETRY_AFTER_S)
            if self._compiler is None or self._compiler.ended:
                self._compiler = _Compiler(self._model, self._program)
            return self._compiler


class _Compiler:
    """A running compiler process."""

    def __init__(self, model: TokenSpace, program: str) -> None:
        """Start the process. Raises OSError."""
        command = [sys.executable, "-P", "-m", program]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._asked: dict[int, Future[Report]] = {}
        self._number, self._lock, self._writing = 0, threading.Lock(), threading.Lock()
        self.ended = False
        self._reader = threading.Thread(target=self._read, name="grammar-reports", daemon=True)
        self._reader.start()
        self._write(model)

    def ask(self, text: str, cpu_s: float, niceness: int, answer_s: float) -> Report:
        """Return the report on `text`. Kill the process after `answer_s`. Raises Unavailable if it dies."""
        answer: Future[Report] = Future()
        with self._lock:
            if self.ended:
                raise _died()
            self._number += 1
            number = self._number
            self._asked[number] = answer
        self._write(Order(number, text, cpu_s, niceness))
        try:
            return answer.result(answer_s)
        except FutureTimeout:
            self.kill()
            raise _died() from None

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        """Wait until the process has exited, after `kill`."""
        self._reader.join()

    def _write(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        with self._writing:
            try:
                send(self._process.stdin, message)  # type: ignore[arg-type]
            except OSError:
                self.kill()  # `_read` then fails all pending requests

    def _read(self) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        with self._process.stdout as reports:
            while body := receive(reports):  # type: ignore[arg-type]
                report = msgspec.msgpack.decode(body, type=Report)
                with self._lock:
                    answer = self._asked.pop(report.number, None)
                if answer is not None:
                    answer.set_result(report)
        with self._lock:
            self.ended = True
            asked, self._asked = self._asked, {}
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # unread orders
            self._process.stdin.close()
        for answer in asked.values():
            answer.set_exception(_died())


def _died() -> Unavailable:
    return Unavailable("The grammar compiler process has died.", retry_after_s=RETRY_AFTER_S)


def _problem(report: Report, cpu_s: float) -> str:
    match report.outcome:
        case "slow":
            return f"the grammar is too complex: compiling it takes more than {cpu_s:g} s of CPU time"
        case "large":
            return f"the grammar is too complex: compiling it takes more than {MAX_BYTES >> 20} MiB of memory"
        case "broken":
            return "internal error while converting the grammar"
        case _:
            return report.problem


def _bytes_of(verdict: Verdict) -> int:
    return VERDICT_BYTES + sys.getsizeof(verdict.grammar)


def _unfinished() -> Future[Verdict]:
    """Return a future that callers cannot cancel, because several may wait for it."""
    future: Future[Verdict] = Future()
    future.set_running_or_notify_cancel()
    return future


def _done(verdict: Verdict) -> Future[Verdict]:
    future = _unfinished()
    future.set_result(verdict)
    return future
