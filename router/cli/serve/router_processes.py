"""Supervisor of `--router-processes`: several router processes with one port, one configuration and one metrics page.

    parent ── a listener of the port (SO_REUSEPORT) each ──> router processes
       ^──────── /health at their Unix sockets ─────────────────┘

The kernel distributes connections by their addresses. The parent serves no requests. It keeps a copy of each listener,
so that connections wait during a restart instead of being rejected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
from pathlib import Path

from common.config import RouterConfig, to_argv
from common.machine import PrivateFolder
from common.wire import CLIENTS_BACKLOG, listening
from router.cli.serve.child import Child, HttpServerChild
from router.cli.serve.keeper import POLL_S, Keeper, StartFailed
from router.cli.serve.liveness import ROUTER_ROUNDS
from router.cli.serve.probe import Address, ask_health
from router.siblings import RouterPart

log = logging.getLogger(__name__)

MODULE = "router.process"
PERIOD_S, START_S = 2.5, 600.0
"""Interval of health checks, and maximum start time."""
ROUTER_STOP_GRACE_S = 10.0
"""Grace period after the drain timeout of each process."""


class RouterProcess(HttpServerChild):
    """One router process. Without its listener, the other processes accept all new connections."""

    shares_port = True

    def __init__(self, config: RouterConfig, part: RouterPart) -> None:
        super().__init__(f"router-{part.index}", MODULE, config)
        self.part = part

    def command(self) -> list[str]:
        place = (str(self.part.index), str(self.part.folder))
        return [sys.executable, "-P", "-m", self.module, *place, *to_argv(self.config)]

    def start(self) -> None:
        self.part.own_socket.unlink(missing_ok=True)  # of the previous process
        super().start()

    def http_address(self) -> Address | None:
        return self.part.own_socket if self.part.own_socket.exists() else None

    @property
    def listens(self) -> bool:
        """Whether it accepts new connections."""
        return self._listener is not None


class RouterProcesses(Keeper):
    """The parent of the router processes."""

    def __init__(self, config: RouterConfig, folder: Path) -> None:
        super().__init__(period_s=PERIOD_S, start_s=START_S, grace_s=config.drain_timeout_s + ROUTER_STOP_GRACE_S)
        count = config.router_processes
        self.processes = [RouterProcess(config, RouterPart(index, count, folder)) for index in range(count)]

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self.processes)

    def rounds_of(self, child: Child) -> int:
        return ROUTER_ROUNDS

    async def start(self) -> None:
        """Start the first process to validate the settings, then the others. Raises StartFailed."""
        first, *others = self.processes
        first.start()
        try:
            async with asyncio.timeout(START_S):
                await self.unless_stopped(_answers(first), (first,))
        except TimeoutError:
            raise StartFailed(f"{first.name} does not answer within {START_S:g} s") from None
        if not self.stopping.is_set():
            for process in others:
                process.start()

    def stop(self) -> None:
        for process in self.processes:
            process.close()
        super().stop()

    def reload(self) -> None:
        """Make all processes reread their files."""
        for process in self.processes:
            process.send_signal(signal.SIGHUP)


async def _answers(process: RouterProcess) -> None:
    while True:
        address = process.http_address()
        if address is not None and (await ask_health(address, PERIOD_S)).has_started:
            return
        await asyncio.sleep(POLL_S)


async def supervise(config: RouterConfig, folder: Path) -> int:
    """Run the processes until a signal. Returns the exit status."""
    parent = RouterProcesses(config, folder)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, parent.stop)
    if config.api_key_file or config.models_file or config.tls_cert or config.audit_log:
        loop.add_signal_handler(signal.SIGHUP, parent.reload)
    try:
        await parent.start()
        if not parent.stopping.is_set():
            log.info("router: serving", extra={"processes": config.router_processes, "port": config.port})
            await parent.run()
    except StartFailed as error:  # the process has logged the reason
        log.error("router: start failed: %s", error)
        return max(1, parent.processes[0].returncode or 1)
    finally:
        parent.stop()
        await parent.shutdown()
    return 0


def run_together(config: RouterConfig, prog: str) -> int:
    """Serve until SIGTERM. Returns the same exit status as a single router process."""
    try:
        with listening.listen(
            config.host, config.port, CLIENTS_BACKLOG
        ) as probe:  # not shared, so that it fails if the port is in use
            port = probe.getsockname()[1]
    except OSError as error:
        print(f"{prog}: cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    with PrivateFolder("router") as folder:  # removes those of killed routers, which may contain responses
        return asyncio.run(supervise(dataclasses.replace(config, port=port), folder.path))
