"""Child processes of `diptych serve`, which restart on the same address.

The supervisor owns the listener of the address and passes a copy to each process that it starts. So no other program
can bind the address during a restart, and connections wait in the backlog.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.config import Config, RouterConfig, WorkerConfig, counterpart_env, to_argv, to_env
from common.machine import ChildProcess
from common.wire import BACKLOG, CLIENTS_BACKLOG, listening
from router.cli.serve.probe import Address

_PR_SET_PDEATHSIG = 1
"""Linux's option of prctl."""
PATIENT_S = 1.0
"""Maximum restart delay, in seconds, for which an HTTP server's listener stays open. During longer delays, clients are
refused at once."""


def _die_with(parent: int) -> Callable[[], None]:
    """A function that the forked child calls so that it dies with `parent`; it does nothing outside Linux."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: the child must not import or allocate

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return tie


def child_environment(config: Config) -> dict[str, str]:
    """The parent's environment without its settings: a child gets those as flags, and secrets as variables."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith("DIPTYCH_") or name == "DIPTYCH_CACHE"
    }
    return kept | to_env(config)


class Child(ChildProcess):
    """A module run in a session of its own, so that a Ctrl-C in the terminal reaches only the supervisor."""

    serves_tls = False

    def __init__(self, name: str, module: str, config: Config) -> None:
        super().__init__(name)
        self.module, self.config = module, config

    def command(self) -> list[str]:
        """`-P`: a folder in the working directory must not shadow a package of the same name."""
        return [sys.executable, "-P", "-m", self.module, *to_argv(self.config)]

    def environment(self) -> dict[str, str]:
        """What the process sees."""
        return child_environment(self.config)

    def options(self) -> dict[str, Any]:
        """More of what `subprocess.Popen` takes."""
        return {}

    def start(self) -> None:
        """Spawn the process; its output goes where the supervisor's goes. Raises OSError."""
        self.launch(
            self.command(),
            self.environment(),
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
            **self.options(),
        )

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`, which ends a stopped process too.

        Only the process that runs now is ended; one that is started in its place meanwhile is left alone.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            process.kill()

    def rest(self, seconds: float) -> None:
        """The process has ended, and is started again after so long."""

    def http_address(self) -> Address | None:
        """Where the running process answers probes; None while that is not known."""
        return None


class ListeningChild(Child):
    """A child that inherits its listener as standard input: see `listening.inherited`."""

    config: RouterConfig | WorkerConfig
    backlog = CLIENTS_BACKLOG
    shares_port = False
    _listener: socket.socket | None = None

    def options(self) -> dict[str, Any]:
        return {} if self._listener is None else {"stdin": self._listener}

    def start(self) -> None:
        self.listen()
        super().start()

    def listen(self) -> None:
        """Bind the address, or a free port for 0. Raises OSError."""
        if self._listener is None:
            host, port = self.config.host, self.config.port
            self._listener = listening.listen(host, port, self.backlog, shared=self.shares_port)

    def close(self) -> None:
        """Close the listener. Connections in its backlog are refused, unless the process still has its copy."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class HttpServerChild(ListeningChild):
    """A child that serves HTTP."""

    config: RouterConfig

    def rest(self, seconds: float) -> None:
        if seconds > PATIENT_S:
            self.close()


class RouterChild(HttpServerChild):
    """The router, on the address of the supervisor's settings."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__("router", "router", config)
        self.serves_tls = bool(config.tls_cert)

    def listen(self) -> None:
        if self.config.router_processes == 1:  # several router processes have one listener each
            super().listen()

    def http_address(self) -> Address | None:
        return self.config.host, self.config.port


class WorkerChild(ListeningChild):
    """A worker, which writes its addresses to a file. After a restart only its control address is the same."""

    config: WorkerConfig
    backlog = BACKLOG

    def __init__(self, module: str, config: WorkerConfig, runtime: Path, other: WorkerConfig | None = None) -> None:
        """`other`: the settings that the worker shall have in the other role, if it may change to that."""
        self._other = other
        self.address_file = runtime / f"{config.worker_id}.json"
        self._http: tuple[str, int] | None = None
        super().__init__(config.worker_id, module, dataclasses.replace(config, address_file=str(self.address_file)))

    def environment(self) -> dict[str, str]:
        other = counterpart_env(self._other) if self._other is not None and self.config.role_change else {}
        return super().environment() | other

    def start(self) -> None:
        self._http = None
        self.address_file.unlink(missing_ok=True)  # it holds the addresses of the process before
        super().start()

    def read_address(self) -> str:
        """The control address, which a restart keeps; "" while the worker has not written it."""
        if not self.address_file.exists():
            return ""
        return str(json.loads(self.address_file.read_text())["address"])

    def http_address(self) -> Address | None:
        if self._http is None and self.address_file.exists():
            url = urlsplit(json.loads(self.address_file.read_text())["http"])
            self._http = str(url.hostname), int(url.port or 0)
        return self._http
