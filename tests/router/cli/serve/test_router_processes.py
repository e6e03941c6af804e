"""The parent of a router's processes, over real ones that only pretend to serve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.stack import free_port
from common.config import RouterConfig
from common.machine import PrivateFolder
from common.wire.listening import listen
from router.cli.serve import child, keeper, router_processes
from router.cli.serve.router_processes import RouterProcesses, run_together

from .... import waiting

PROCESS = """
import http.server, os, pathlib, signal, socket, socketserver, sys, threading
index, folder, *flags = sys.argv[1:]
here = socket.socket(fileno=os.dup(0))
if "--max-retries=99" in flags:
    sys.exit(7)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        (pathlib.Path(folder) / f"{index}.asked").touch()
    def address_string(self): return ""
    def log_message(self, *args): pass
path = pathlib.Path(folder) / f"{index}.sock"
path.unlink(missing_ok=True)
inner = socketserver.UnixStreamServer(str(path), Healthy)
threading.Thread(target=inner.serve_forever, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.signal(signal.SIGHUP, lambda *_: (pathlib.Path(folder) / f"{index}.hup").touch())
here.setblocking(True)
while True:
    client, _ = here.accept()
    client.sendall(f"{index} {os.getpid()}".encode())
    client.close()
"""
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "pretended_process.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    monkeypatch.setattr(router_processes, "MODULE", "pretended_process")
    monkeypatch.setattr(keeper, "FIRST_BACKOFF_S", 0.05)


@pytest.fixture
def config() -> RouterConfig:
    return RouterConfig(router_processes=3, port=free_port())


@contextlib.asynccontextmanager
async def parent_of(config: RouterConfig, folder: Path) -> AsyncIterator[RouterProcesses]:
    os.mkdir(folder)
    parent = RouterProcesses(config, folder)
    await parent.start()
    running = asyncio.create_task(parent.run())
    try:
        yield parent
    finally:
        parent.stop()
        await running


until = functools.partial(waiting.until, patience_s=WAIT_S)


async def answered(config: RouterConfig) -> tuple[int, int]:
    """Number and pid of the process that a new connection goes to."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(config.host, config.port)
        try:
            index, pid = (await reader.read()).split()
        finally:
            writer.close()
            await writer.wait_closed()
    return int(index), int(pid)


async def all_answer(config: RouterConfig) -> dict[int, int]:
    """The pids of all processes by their numbers, as connections find them."""
    found: dict[int, int] = {}
    async with asyncio.timeout(WAIT_S):
        while len(found) < config.router_processes:
            found.update([await answered(config)])
    return found


@pytest.mark.slow
async def test_connections_are_dealt_out_to_all(config: RouterConfig, tmp_path: Path) -> None:
    async with parent_of(config, tmp_path / "run") as parent:
        found = await all_answer(config)
        assert found == {process.part.index: process.pid for process in parent.processes}
    assert not any(process.alive for process in parent.processes)
    with pytest.raises(OSError):
        await asyncio.open_connection(config.host, config.port)


@pytest.mark.slow
async def test_no_connection_is_refused_while_a_process_is_started_again(config: RouterConfig, tmp_path: Path) -> None:
    async with parent_of(config, tmp_path / "run") as parent:
        before = await all_answer(config)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: not parent.processes[1].alive or parent.processes[1].pid != before[1])
        for _ in range(40):
            await answered(config)
        await until(lambda: parent.processes[1].alive and parent.processes[1].pid != before[1])
        after = await all_answer(config)
        assert after[1] != before[1] and (after[0], after[2]) == (before[0], before[2])


@pytest.mark.slow
async def test_a_process_that_stays_away_gets_no_connection(
    config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PATIENT_S", 0.0)
    monkeypatch.setattr(keeper, "FIRST_BACKOFF_S", 20.0)
    async with parent_of(config, tmp_path / "run") as parent:
        before = await all_answer(config)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: not parent.processes[1].listens)
        assert {(await answered(config))[0] for _ in range(40)} == {0, 2}


@pytest.mark.slow
async def test_a_stuck_process_is_ended(config: RouterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_processes, "PERIOD_S", 0.3)
    monkeypatch.setattr(router_processes, "ROUTER_STOP_GRACE_S", -29.0)  # beyond a drain of 30 s
    async with parent_of(config, tmp_path / "run") as parent:
        before = await all_answer(config)
        await until((tmp_path / "run" / "2.asked").exists)  # it has started, as the parent knows with the next round
        await asyncio.sleep(0.6)
        os.kill(before[2], signal.SIGSTOP)
        await until(lambda: parent.processes[2].alive and parent.processes[2].pid != before[2])
        assert (await all_answer(config))[2] != before[2]


@pytest.mark.slow
async def test_all_are_told_to_read_their_files_again(config: RouterConfig, tmp_path: Path) -> None:
    async with parent_of(config, tmp_path / "run") as parent:
        await all_answer(config)
        parent.reload()
        await until(lambda: all((tmp_path / "run" / f"{index}.hup").exists() for index in range(3)))


def test_a_start_that_is_refused_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    assert run_together(RouterConfig(router_processes=3, port=free_port(), max_retries=99), "diptych router") == 7
    assert "router-0 exited during startup (exit status 7)" in caplog.text


def test_a_port_of_another_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0, 1, shared=True) as other:
        port = other.getsockname()[1]
        assert run_together(RouterConfig(router_processes=2, port=port), "diptych router") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.slow
def test_they_die_with_their_parent_and_leave_nothing_for_long(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; from common.config import RouterConfig; from router.cli.serve import router_processes\n"
        "router_processes.MODULE = 'pretended_process'\n"
        f"sys.exit(router_processes.run_together(RouterConfig(router_processes=2, port={config.port}), 'x'))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with subprocess.Popen([sys.executable, "-P", "-c", program], env=environment) as parent:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            deadline = time.monotonic() + WAIT_S
            while len(pids := children.read_text().split()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            (left,) = Path(folder).iterdir()
            with PrivateFolder("router"):
                assert left.exists()
            parent.kill()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with PrivateFolder("router"):
            assert not left.exists()


def test_a_shared_port_takes_no_stranger(config: RouterConfig) -> None:
    with (
        listen(config.host, config.port, 1, shared=True),
        listen(config.host, config.port, 1, shared=True),
        pytest.raises(OSError),
    ):
        listen(config.host, config.port, 1)
