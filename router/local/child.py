"""One child process of `diptych serve`: started with a config, restarted on the same address, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from common.config import RouterConfig, WorkerConfig
from common.config.field import Config, to_argv, to_env

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> Callable[[], None]:
    """A function for the forked child that ties its life to `parent` (Linux; elsewhere only signals tie them)."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: the child must not import or allocate

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return tie


def child_environment(config: Config) -> dict[str, str]:
    """The parent's environment without settings, which travel as flags; only secrets come as variables."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith("DIPTYCH_") or name == "DIPTYCH_CACHE"
    }
    return kept | to_env(config)


def _signal(process: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    """Not by `send_signal`: that looks whether the process lives, and takes its exit status away from the loop."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signum)


class Child:
    """A module run in a process group of its own, so that a Ctrl-C in the terminal reaches only the supervisor."""

    def __init__(self, name: str, module: str, config: Config) -> None:
        self.name, self.module, self.config = name, module, config
        self.started_at = 0.0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def command(self) -> list[str]:
        """`-P`: what lies in the working folder is not taken for a package of that name."""
        return [sys.executable, "-P", "-m", self.module, *to_argv(self.config)]

    async def start(self) -> None:
        """Spawns the process; its output goes where the supervisor's goes."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command(),
            stdin=asyncio.subprocess.DEVNULL,
            env=child_environment(self.config),
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        self.started_at = time.monotonic()

    async def wait(self) -> int:
        """The exit status, negative for a signal."""
        assert self._process is not None, f"{self.name} was not started"
        return await self._process.wait()

    def send(self, signum: signal.Signals) -> None:
        """Signals the process if it still runs."""
        if self._process is not None and self._process.returncode is None:
            _signal(self._process, signum)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL, which a stopped process obeys too, when it still runs after `grace_s`.

        Only the process of now: the one that takes its place meanwhile is left alone.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            _signal(process, signal.SIGKILL)

    @property
    def serves_tls(self) -> bool:
        return False

    def http_address(self) -> tuple[str, int] | None:
        """Where it answers probes in this life; None while nobody knows."""
        return None


class RouterChild(Child):
    """The router: its address is chosen for it."""

    config: RouterConfig

    def __init__(self, config: RouterConfig) -> None:
        super().__init__("router", "router", config)

    @property
    def serves_tls(self) -> bool:
        return bool(self.config.tls_cert)

    def http_address(self) -> tuple[str, int] | None:
        return self.config.host, self.config.port


class WorkerChild(Child):
    """A worker: tells its addresses through a file. In its next life only the control address is the same."""

    config: WorkerConfig

    def __init__(self, module: str, config: WorkerConfig, runtime: Path) -> None:
        self.address_file = runtime / f"{config.worker_id}.json"
        self._http: tuple[str, int] | None = None
        super().__init__(config.worker_id, module, dataclasses.replace(config, address_file=str(self.address_file)))

    async def start(self) -> None:
        self._http = None
        self.address_file.unlink(missing_ok=True)  # what it says is of the life before
        await super().start()

    def read_address(self) -> str:
        """The control address, "" while the worker has not written it; from then on also that of its next life."""
        if not self.address_file.exists():
            return ""
        address = str(json.loads(self.address_file.read_text())["address"])
        self.config = dataclasses.replace(self.config, port=int(address.rpartition(":")[2]))
        return address

    def http_address(self) -> tuple[str, int] | None:
        if self._http is None and self.address_file.exists():
            url = urlsplit(json.loads(self.address_file.read_text())["http"])
            self._http = str(url.hostname), int(url.port or 0)
        return self._http
