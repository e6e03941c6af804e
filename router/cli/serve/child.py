"""Child processes of `diptych serve`, which restart on the same address.

The supervisor owns the listener of the address and passes a copy to each process that it starts. During a restart,
no other program can bind the address, and connections wait in the backlog.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from common.config import OTHER_VARIABLES, Config, RouterConfig, WorkerConfig, counterpart_env, to_argv, to_env
from common.machine import ChildProcess
from common.wire import BACKLOG, CLIENTS_BACKLOG, listening
from router.cli.serve.probe import Address

LAST_LINE_S, MAX_LAST_CHARS = 0.2, 500
"""Maximum wait for the last line of a process that has exited, in seconds, and its maximum length."""
MAX_PART_BYTES = 65_536
"""Maximum part of a line that is copied at once."""
PATIENT_S = 1.0
"""Maximum restart delay, in seconds, for which an HTTP server's listener stays open. During longer delays, clients are
rejected immediately."""


def child_environment(config: Config) -> dict[str, str]:
    """Return the environment of a child. It gets settings as flags, and only secrets as variables."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith("DIPTYCH_") or name in OTHER_VARIABLES
    }
    return kept | to_env(config)


class Child(ChildProcess):
    """A module in its own session, so that Ctrl-C in the terminal reaches only the supervisor."""

    serves_tls = False

    def __init__(self, name: str, module: str, config: Config) -> None:
        super().__init__(name, tied=True)
        self.module, self.config = module, config

    def command(self) -> list[str]:
        """Command line. `-P` keeps folders in the working directory from shadowing packages."""
        return [sys.executable, "-P", "-m", self.module, *to_argv(self.config)]

    def environment(self) -> dict[str, str]:
        """Environment of the process."""
        return child_environment(self.config)

    def options(self) -> dict[str, Any]:
        """Further options of `subprocess.Popen`."""
        return {}

    def start(self) -> None:
        """Start the process with the output of the supervisor. Raises OSError."""
        self.launch(
            self.command(),
            self.environment(),
            start_new_session=True,
            **self.options(),
        )

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`.

        Only the current process is stopped, not one that replaces it in the meantime.
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
        """Called before a restart of the process in `seconds`."""

    def http_address(self) -> Address | None:
        """Address for health checks; None while it is unknown."""
        return None


class ListeningChild(Child):
    """A child that inherits its listener as standard input (see `listening.inherited`)."""

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
        """Bind the address; port 0 picks a free port. Raises OSError."""
        if self._listener is None:
            host, port = self.config.host, self.config.port
            self._listener = listening.listen(host, port, self.backlog, shared=self.shares_port)

    def close(self) -> None:
        """Close the listener. This rejects connections in its backlog, unless the process still has its copy."""
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
    """The router."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__("router", "router", config)
        self.serves_tls = bool(config.tls_cert)

    def listen(self) -> None:
        if self.config.router_processes == 1:  # several router processes have one listener each
            super().listen()

    def http_address(self) -> Address | None:
        return self.config.host, self.config.port


class LastLine:
    """Copies a pipe to standard error until its end, and keeps the beginning of the last line."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._text = pipe, ""
        self._thread = threading.Thread(target=self._copy, name="worker errors", daemon=True)
        self._thread.start()

    def read(self) -> str:
        """Return the last line of a process that has exited. Blocks for up to LAST_LINE_S."""
        self._thread.join(LAST_LINE_S)
        return self._text[:MAX_LAST_CHARS]

    def _copy(self) -> None:
        with self._pipe:
            begins = True
            while part := self._pipe.readline(MAX_PART_BYTES):
                with suppress(OSError):  # a full disk, or a closed terminal: the worker must not notice
                    sys.stderr.buffer.write(part)
                    sys.stderr.buffer.flush()
                if begins:
                    self._text = part.decode(errors="replace").strip() or self._text
                begins = part.endswith(b"\n")


class WorkerChild(ListeningChild):
    """A worker, which writes its addresses to a file. Only its control address survives a restart."""

    config: WorkerConfig
    backlog = BACKLOG
    keeps_errors = False
    """Whether this process copies its standard error, for `last_error`."""
    _last_line: LastLine | None = None

    def __init__(self, module: str, config: WorkerConfig, runtime: Path, other: WorkerConfig | None = None) -> None:
        """`other` holds the settings of the worker in the other role, if it may change its role."""
        self._other = other
        self.address_file = runtime / f"{config.worker_id}.json"
        self._addresses: dict[str, Any] = {}
        super().__init__(config.worker_id, module, dataclasses.replace(config, address_file=str(self.address_file)))

    def options(self) -> dict[str, Any]:
        return super().options() | ({"stderr": subprocess.PIPE} if self.keeps_errors else {})

    async def last_error(self) -> str:
        """Return the last line that the worker wrote to its standard error before it exited."""
        return await asyncio.to_thread(self._last_line.read) if self._last_line is not None else ""

    def environment(self) -> dict[str, str]:
        other = counterpart_env(self._other) if self._other is not None and self.config.role_change else {}
        return super().environment() | other

    def start(self) -> None:
        self._addresses = {}
        self.address_file.unlink(missing_ok=True)  # it has the addresses of the previous process
        super().start()
        if self.keeps_errors and self._process is not None and self._process.stderr is not None:
            self._last_line = LastLine(self._process.stderr)

    def read_address(self) -> str:
        """Return the control address, or "" while the worker has not written it."""
        return str(self._written().get("address", ""))

    def http_address(self) -> Address | None:
        url = urlsplit(self._written().get("http", ""))
        return (url.hostname, int(url.port or 0)) if url.hostname else None

    def _written(self) -> dict[str, Any]:
        """Return the content of the address file of the current process, {} without one. It is read once."""
        if not self._addresses:
            with suppress(FileNotFoundError, ValueError):
                self._addresses = json.loads(self.address_file.read_text())
        return self._addresses
