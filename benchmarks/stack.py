"""A whole Diptych on this machine, as real processes on ephemeral ports, for benchmarks and end-to-end tests.

    with Stack(StackSettings(prefill=1, decode=1, model="tiny-random", dtype="float32")) as stack:
        httpx.get(stack.url + "/v1/models")
        stack.workers("decode")[0].kill()

The processes are the ones a cluster runs: `python -m prefill_worker`, `.decode_worker`, `.router`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from common.machine.child_process import STOP_TIMEOUT_S, ChildProcess

LOOPBACK = "127.0.0.1"
POLL_INTERVAL_S = 0.02
READY_TIMEOUT_S = 120.0
"""How long all processes of a stack may take to start."""
PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections, which may take one between its choice and its use."""


class StackError(Exception):
    """A process of the stack died or was not ready in time. The message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: `prefix` starts a command there (`ip netns exec NAME`), `host` is its address there."""

    prefix: tuple[str, ...] = ()
    host: str = LOOPBACK


class StackProcess(ChildProcess):
    """One process of a stack: its command, its log file and the addresses it listens on."""

    log: Path

    def __init__(
        self, name: str, role: str, command: Sequence[str], log: Path, cores: Sequence[int] = (), *, tied: bool = False
    ) -> None:
        super().__init__(name, log, tied=tied)
        self.role, self.command, self.cores = role, list(command), tuple(cores)
        self.address_file = log.with_suffix(".json")
        self.addresses: dict[str, str] = {}

    def start(self, *extra: str, env: Mapping[str, str] | None = None) -> None:
        """Spawn the process. `extra` flags follow the command's own."""
        self.address_file.unlink(missing_ok=True)
        self.launch([*self.command, *extra], env)
        if self.cores:  # before the process has threads of its own, so that all of them inherit it
            os.sched_setaffinity(self.pid, self.cores)

    @property
    def http_url(self) -> str:
        """Where the process answers /metrics and /health."""
        address = self.addresses["http"]
        return address if "://" in address else f"http://{address}"

    def wait_for_addresses(self, deadline: float) -> None:
        """Read the worker's address file once it is there. Raises StackError at `deadline` (monotonic seconds)."""
        while not self.address_file.exists():
            self.check(deadline, "wrote no address file")
            time.sleep(POLL_INTERVAL_S)
        self.addresses = json.loads(self.address_file.read_text())

    def check(self, deadline: float, problem: str) -> None:
        """Raise StackError when the process has ended, or when `deadline` has passed with `problem` unsolved."""
        if not self.alive:
            raise StackError(self.describe_end())
        if time.monotonic() >= deadline:
            raise StackError(f"{self.name} {problem} in time\n{self.log_tail()}")

    def pause(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)


def _own_address(worker: StackProcess) -> str:
    return worker.addresses["address"]


@dataclass(frozen=True)
class StackSettings:
    """`prefill` prefill workers, `decode` decode workers and `routers` routers of one model, and how they run.

    `*_flags` are handed to the processes as they are; `worker_flags` goes to both kinds of worker. `*_cores` pin a
    kind of worker to these cores. `places` says by name ("router", "router-1", "decode-0") which processes run
    elsewhere. `via` names the address under which routers reach a worker. `env` is added to this process's own. Logs go
    to `log_dir`, or to a temporary folder that ends with the stack. With `tied`, the processes die
    if this one is killed; start and restart them from the main thread only.
    """

    prefill: int = 1
    decode: int = 1
    _: KW_ONLY
    routers: int = 1
    model: str = "smollm2-135m"
    dtype: str = "float32"
    quantization: str = "none"
    worker_flags: Sequence[str] = ()
    prefill_flags: Sequence[str] = ()
    decode_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    prefill_cores: Sequence[int] = ()
    decode_cores: Sequence[int] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    via: Callable[[StackProcess], str] = _own_address
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    tied: bool = False
    ready_timeout_s: float = READY_TIMEOUT_S

    @property
    def num_processes(self) -> int:
        return self.prefill + self.decode + self.routers


class Stack:
    """The processes of `settings`, which all are ready when the `with` block begins."""

    def __init__(self, settings: StackSettings) -> None:
        self.settings = settings
        self._temporary = None
        if settings.log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="diptych-stack-")
        self.log_dir = settings.log_dir or Path(self._temporary.name if self._temporary is not None else ".")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.model = settings.model
        self._env = {**os.environ, **settings.env}
        of_model = ("--model", settings.model, "--dtype", settings.dtype, "--quantization", settings.quantization)
        prefill_flags = (*of_model, *settings.worker_flags, *settings.prefill_flags)
        decode_flags = (*of_model, *settings.worker_flags, *settings.decode_flags)
        self.processes = [
            *(self._worker("prefill", i, prefill_flags, settings.prefill_cores) for i in range(settings.prefill)),
            *(self._worker("decode", i, decode_flags, settings.decode_cores) for i in range(settings.decode)),
        ]
        self.routers = [
            self._router(i, ("--model", settings.model, *settings.router_flags)) for i in range(settings.routers)
        ]
        self.router = self.routers[0]

    @property
    def url(self) -> str:
        """Of the first router."""
        return self.router.http_url

    @property
    def port(self) -> int:
        """Of the first router's HTTP."""
        return int(self.url.rpartition(":")[2])

    @property
    def everything(self) -> list[StackProcess]:
        return [*self.processes, *self.routers]

    def workers(self, role: str = "") -> list[StackProcess]:
        """The workers of one role ("prefill" or "decode"), or all of them."""
        return [process for process in self.processes if role in ("", process.role)]

    def start(self) -> None:
        """Start everything and wait until the router is ready. Raises StackError; nothing is left running then."""
        deadline = time.monotonic() + self.settings.ready_timeout_s
        try:
            for worker in self.processes:
                worker.start(env=self._env)
            for worker in self.processes:
                worker.wait_for_addresses(deadline)
            for router in self.routers:
                self._start_router(router)
            self.wait_ready(deadline)
        except BaseException:
            self.stop()
            raise

    def restart(self, worker: StackProcess, *, same_ports: bool = True) -> None:
        """Start a dead process again; with `same_ports` on the ports that a worker had, where routers find it.

        Returns once it listens; raises StackError.
        """
        if worker.role == "router":
            self._start_router(worker)
            return
        flags: list[str] = []
        if same_ports:
            for flag, key in (("--port", "address"), ("--kv-port", "kv_address"), ("--lend-port", "lend_address")):
                if worker.addresses.get(key):
                    flags += [flag, worker.addresses[key].rpartition(":")[2]]
        worker.start(*flags, env=self._env)
        worker.wait_for_addresses(time.monotonic() + self.settings.ready_timeout_s)

    def wait_ready(self, deadline: float) -> None:
        """Wait until every router answers /ready with 200. Raises StackError at `deadline` (monotonic seconds)."""
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            for router in self.routers:
                while not self._answers_ready(client, router):
                    for process in self.everything:
                        last = router.log_tail().rpartition("\n")[2]
                        process.check(deadline, f"belongs to a stack that was not ready (router log: {last})")
                    time.sleep(POLL_INTERVAL_S)

    def stop(self) -> None:
        """End every process within STOP_TIMEOUT_S, those that do not obey by force; temporary logs go with them."""
        processes = (*self.routers, *self.processes)
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.wait(deadline)
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _worker(self, role: str, index: int, flags: Sequence[str], cores: Sequence[int]) -> StackProcess:
        name = f"{role}-{index}"
        log, place = self.log_dir / f"{name}.log", self.settings.places.get(name, Place())
        own = ["--worker-id", name, "--address-file", str(log.with_suffix(".json"))]
        if place.host != LOOPBACK:
            own += ["--host", place.host, "--allow-remote"]
        command = [*place.prefix, *_module(f"{role}_worker", (*own, *flags))]
        return StackProcess(name, role, command, log, cores, tied=self.settings.tied)

    def _router(self, index: int, flags: Sequence[str]) -> StackProcess:
        name = f"router-{index}" if index else "router"
        place, port = self.settings.places.get(name, Place()), free_port()
        command = [*place.prefix, *_module("router", ("--host", place.host, "--port", str(port), *flags))]
        router = StackProcess(name, "router", command, self.log_dir / f"{name}.log", tied=self.settings.tied)
        router.addresses = {"http": f"http://{place.host}:{port}"}
        return router

    def _start_router(self, router: StackProcess) -> None:
        addresses = [
            flag
            for role in ("prefill", "decode")
            if self.workers(role)
            for flag in (f"--{role}", ",".join(self.settings.via(worker) for worker in self.workers(role)))
        ]
        router.start(*addresses, env=self._env)

    @staticmethod
    def _answers_ready(client: httpx.Client, router: StackProcess) -> bool:
        try:
            return client.get(f"{router.http_url}/ready").status_code == httpx.codes.OK
        except httpx.TransportError:  # not listening yet
            return False


_turns = itertools.count(os.getpid() * 101)  # neighbours among processes are far apart among ports


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago, and that no outgoing connection will be given.

    Another call gives another port, in this process and in those that look for ports beside it.
    """
    for turn in itertools.islice(_turns, len(PORTS)):
        port = PORTS[turn % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise StackError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")


def _module(name: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", name, *flags]  # -P: the current folder must not shadow installed packages
