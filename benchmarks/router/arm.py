"""The servers under test: a real router between stand-ins or the plain application, with processes and commands."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from benchmarks.router import load, plain, stand_in
from benchmarks.router.tally import SPAWN, Tally
from benchmarks.stack import StackError, free_port
from common.machine.child_process import ChildProcess

READY_S = 60.0
REPLY_S = 120.0
END_S = 10.0
POLL_S = 0.02
ASKED_EACH = 16
"""Connections for each process of a router before a measurement: the kernel deals them out, and a process that is
still starting would be measured at that."""
ROOM = (
    *("--max-inflight", "1000000", "--max-connections", "1000000"),
    *("--max-wait-s", "600", "--overload-wait-s", "600", "--queue-timeout-s", "600", "--token-timeout-s", "600"),
    *("--worker-timeout-s", "10", "--max-body-bytes", str(64 * 2**20)),
)
"""Bounds so large that the load meets none of them."""
USER_TICKS, SYSTEM_TICKS = 11, 12
"""Places in /proc/PID/stat behind the name."""


class Remote:
    """A process of the benchmark that answers commands."""

    def __init__(self, target: Callable[..., None], *values: Any) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, *values), daemon=True)
        self.process.start()
        theirs.close()
        self.greeting = self.reply()

    def ask(self, *command: Any) -> Any:
        """Its answer to a command. Raises StackError when there is none in time."""
        self.post(*command)
        return self.reply()

    def post(self, *command: Any) -> None:
        """Begin a command; `reply` has its answer."""
        self._pipe.send(command)

    def reply(self) -> Any:
        pipe: Connection = self._pipe
        if not pipe.poll(REPLY_S):
            raise StackError(f"no answer from process {self.process.pid} within {REPLY_S:g} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise StackError(f"process {self.process.pid} of the benchmark has ended") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        if self.process.is_alive():
            self.ask("end")
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()


class Source(Protocol):
    """What makes tokens, and answers commands."""

    def ask(self, *command: Any) -> Any:
        """Its answer to a command."""
        ...


class Arm(ABC):
    """A server under load: `source` makes its tokens, `clients` read them, `tally` counts what they read.

    Where it is not `paced`, the source makes tokens as fast as it can, and nothing tells how many. There may be
    `most_streams` at once, each of `stream_tokens`.
    """

    paced, most_streams, stream_tokens = True, 1 << 20, 4_000_000

    num_serving = 1
    """Processes of the server that answer requests."""
    cores: frozenset[int] = frozenset()
    """Those that the server has for itself; none: it shares all with the load."""

    def __init__(self, name: str, num_clients: int) -> None:
        self.name, self.tally, self.port, self.pid = name, Tally(num_clients), 0, 0
        self.model = "plain"
        self._num_clients = num_clients
        self.clients: list[Remote] = []
        self.source: Source
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.start()
            for number in range(self._num_clients):
                self.clients.append(Remote(load.serve, self.tally, number))
                self._stack.callback(self.clients[-1].end)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def start(self) -> None:
        """Start the server and what makes its tokens."""

    @property
    def pids(self) -> list[int]:
        """The processes that are measured: the server and all that it started."""
        return _family(self.pid)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the server so far, all its threads included, to a hundredth."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def main_thread_s(self) -> float:
        """CPU seconds of its event loops so far, to the nanosecond."""
        stats = (Path(f"/proc/{pid}/task/{pid}/schedstat").read_text() for pid in self.pids)
        return 1e-9 * sum(int(stat.split()[0]) for stat in stats)

    @property
    def rss_kib(self) -> float:
        """Resident memory of the server."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024


class RouterArm(Arm):
    """The production command in front of stand-ins; `tree` is the folder of another version of the router."""

    def __init__(
        self, name: str, num_clients: int, model: str, workers: tuple[int, int], token_id: int, *,
        tree: Path | None = None, num_processes: int = 1, flags: Sequence[str] = (), log_dir: Path,
    ) -> None:  # fmt: skip
        super().__init__(name, num_clients)
        self.model, self.num_serving = model, num_processes
        self._workers, self._token_id, self._tree, self._flags = workers, token_id, tree, flags
        self._process = ChildProcess(f"router {name}", log_dir / f"router-{name}.log".replace(" ", "-"))

    def start(self) -> None:
        self.source = source = Remote(stand_in.serve, self.tally, *self._workers, self._token_id)
        self._stack.callback(source.end)
        self.port = free_port()
        command = [sys.executable, "-P", "-m", "router", "--model", self.model, "--port", str(self.port), *ROOM]
        for role, addresses in source.greeting.items():
            command += [f"--{role}", ",".join(addresses)] if addresses else []
        if self.num_serving > 1:
            command += ["--router-processes", str(self.num_serving)]
        with on_cores(self.cores):
            self._process.launch([*command, *self._flags], self._env(), cwd=self._tree)
        self._stack.callback(self._end)
        self.pid = self._process.pid
        for _ in range(1 if self.num_serving == 1 else ASKED_EACH * self.num_serving):  # each on a new connection
            wait_ready(self._process, f"http://127.0.0.1:{self.port}/ready", READY_S)

    def _env(self) -> Mapping[str, str] | None:
        return None if self._tree is None else {**os.environ, "PYTHONPATH": str(self._tree)}

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(time.monotonic() + END_S)


class PlainArm(Arm):
    """The floor."""

    def __init__(self, num_clients: int, backlog: int) -> None:
        super().__init__("plain uvicorn", num_clients)
        self._backlog = backlog

    def start(self) -> None:
        with on_cores(self.cores):
            self.source = source = Remote(plain.serve, self.tally, load.TOKEN.decode(), self._backlog)
        self._stack.callback(source.end)
        self.port, self.pid = source.greeting, source.process.pid or 0


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores alone, if there are any; this one goes back."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def wait_ready(process: ChildProcess, url: str, timeout_s: float) -> None:
    """Raises StackError when the server ends, or does not answer in time that it is ready."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            try:
                if client.get(url).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:  # not listening yet
                pass
            if not process.alive or time.monotonic() > deadline:
                raise StackError(f"{process.name} was not ready in time\n{process.log_tail()}")
            time.sleep(POLL_S)


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]
