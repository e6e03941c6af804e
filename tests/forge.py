"""Processes that have imported all that a worker or a router needs, and fork them: each starts in a tenth of the time.

A forked worker or router is real in all else: it runs the same `main` with the same arguments, environment, log file
and sockets of its own. It differs from `python -m decode_worker` in how its modules came into memory. Routers come from
a process without torch. What another program or environment variable would change, and every process with a command of
another form, is started as ever.

    Forge ── {"argv", "env", "log"} ──> the process of this file ── fork ──> worker
          <── pid, then its exit status when asked

All processes of a test run connect to the same two of this file (`SharedForges`), which import once and fork a process
for each connection, which forks on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

WORKERS = {
    "prefill_worker": ("prefill_worker.__main__", "prefill_worker.duty", "common.engine.worker.process"),
    "decode_worker": ("decode_worker.__main__", "decode_worker.duty", "common.engine.worker.process"),
    "tests.paced": ("tests.paced", "common.engine.worker.process"),
}
ROUTERS = {
    "router": (
        *("router.__main__", "uvloop", "common.model_files.resolve", "router.dispatch.dispatcher"),
        *("router.generation.tracing", "router.observe.measured_client", "router.observe.metrics"),
        *("router.observe.collectors", "router.observe.slo", "router.server.app", "router.server.server"),
        "router.text.text_pipeline",
    )
}
"""By module that is run: what it would import, first what has its `main`."""
KINDS = {"workers": WORKERS, "routers": ROUTERS}
PLAIN = [sys.executable, "-P", "-m"]
MAX_MESSAGE_BYTES = 1 << 20
ANSWER_S = 60.0
POLL_S = 0.01


@contextlib.contextmanager
def forged_processes(folder: str) -> Iterator[None]:
    """Within it every stack forks its workers and routers. `folder` is that of `SharedForges`."""
    from benchmarks.stack import StackProcess

    forges, before = (Forge("workers", folder), Forge("routers", folder)), StackProcess.spawn

    def spawn(command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        environment = dict(os.environ if env is None else env)
        for forge in forges:
            if forge.makes(command, environment):
                return forge.spawn(command, environment, options["stdout"].name)
        return subprocess.Popen(command, env=env, **options)

    StackProcess.spawn = staticmethod(spawn)
    try:
        yield
    finally:
        StackProcess.spawn = staticmethod(before)
        for forge in forges:
            forge.close()


class SharedForges:
    """A process of this file for each kind, to which the `Forge` of any process connects; it imports for the first."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="diptych-forge-")
        self._processes = [self._start(kind) for kind in KINDS]

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(Path(self.folder, kind)))
            listener.listen()
            command = [*PLAIN[:2], str(Path(__file__)), kind, str(listener.fileno())]
            return subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)

    def close(self) -> None:
        """End both processes, after those that connected to them."""
        for process in self._processes:
            process.communicate(timeout=ANSWER_S)
        shutil.rmtree(self.folder)


class Forge:
    """Starts processes of one kind, "workers" or "routers"; connects to the process that forks them when first used."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind, self._path, self._lock = kind, Path(folder, kind), threading.Lock()
        self._socket: socket.socket | None = None

    def makes(self, command: Sequence[str], environment: dict[str, str]) -> bool:
        """Whether it can start this, and a fork would be the same."""
        is_plain = list(command[:3]) == PLAIN and command[3] in KINDS[self._kind]
        # Any cores: torch counts them when it is imported.
        return is_plain and "--cores" not in command and _differs_in_settings_alone(environment)

    def spawn(self, command: Sequence[str], environment: dict[str, str], log: str) -> Forked:
        """Fork what runs this."""
        return Forked(self, self.ask({"argv": list(command[3:]), "env": environment, "log": log}))

    def ask(self, order: dict[str, Any]) -> int:
        """One question and its answer. Raises OSError when the forge has ended, TimeoutError when it hangs."""
        with self._lock:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._socket.connect(str(self._path))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
                self._socket.settimeout(ANSWER_S)
            self._socket.send(json.dumps(order).encode())
            answer = self._socket.recv(MAX_MESSAGE_BYTES)
        if not answer:
            raise ConnectionResetError(f"the process that forks {self._kind} has ended")
        return int(json.loads(answer))

    def close(self) -> None:
        """End the process at the other end, and with it what it forked."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class Forked:
    """One forked process. The forge is its parent, so the forge knows how it ended."""

    def __init__(self, forge: Forge, pid: int) -> None:
        self._forge, self.pid = forge, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs; negative for the signal that ended it."""
        if self.returncode is None and (status := self._forge.ask({"poll": self.pid})) != RUNNING:
            self.returncode = status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


RUNNING = 1000  # no exit status


def _differs_in_settings_alone(environment: dict[str, str]) -> bool:
    """Whether a process that is there already may take this environment: no library has read what differs."""
    names = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    return all(name.startswith(("DIPTYCH_", "PYTEST_", "POD_")) for name in names)


def import_all(kind: str) -> None:
    """All that processes of a kind import."""
    if kind == "workers":
        from common.machine.cores import spin_briefly

        spin_briefly()  # before torch reads the environment
    for names in KINDS[kind].values():
        for name in names:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that children share the pages of what is there


def accept(kind: str, listener: socket.socket) -> None:
    """Fork a process for each connection, which serves it, until standard input closes; then wait for these."""
    serving: list[int] = []
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        orders = listener.accept()[0]
        if not serving:
            import_all(kind)
        serving.append(os.fork())
        if not serving[-1]:
            listener.close()
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            serve(orders)
            os._exit(0)
        orders.close()
    for pid in serving:  # so that the time of all that they forked counts as that of the tests
        os.waitpid(pid, 0)


def serve(orders: socket.socket) -> None:
    """Fork what is asked for until the other side closes, then kill what is left."""
    orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
    children: set[int] = set()
    while message := orders.recv(MAX_MESSAGE_BYTES):
        order = json.loads(message)
        if "poll" in order:
            answer = _status(order["poll"], children)
        elif (answer := os.fork()) == 0:
            _become(order, orders)
        else:
            children.add(answer)
        orders.send(json.dumps(answer).encode())
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _status(pid: int, children: set[int]) -> int:
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return RUNNING
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _become(order: dict[str, Any], orders: socket.socket) -> NoReturn:
    """The child: its own environment, log and arguments, as the operating system would have made it."""
    orders.close()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["env"])
    module, *argv = order["argv"]
    sys.argv = [module, *argv]
    main = importlib.import_module((WORKERS | ROUTERS)[module][0]).main
    if module in ROUTERS:
        raise SystemExit(main(argv))
    status = 1
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        from common.engine.worker.process import end_process

        end_process(status)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    kind, descriptor = sys.argv[1:]
    accept(kind, socket.socket(fileno=int(descriptor)))
    os._exit(0)  # to take torch apart would take a second or two
