"""When the supervisor ends a process that hangs, and when it does not."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme
import yaml

from common.config import RouterConfig, ServeConfig
from router.cli.serve.child import Child
from router.cli.serve.liveness import ROUTER_ROUNDS, WORKER_ROUNDS, Pulse, loading, watch
from router.cli.serve.probe import Health, ask_health, claim_port

from .... import waiting

GOLDEN = Path(__file__).parents[3] / "helm" / "golden" / "default.yaml"

# ---------------------------------------------------------------- the count

GOOD, LOADING = Health("", has_started=True), Health("", has_started=False)
SILENT, STUCK = Health("no answer", has_started=False), Health("HTTP 503", has_started=True)
AWAY = None


@pytest.mark.parametrize(
    ("rounds", "is_over"),
    [
        ((GOOD, STUCK, SILENT, STUCK), True),
        ((STUCK, STUCK, STUCK), True),  # it hung before the first probe
        ((GOOD, STUCK, SILENT), False),
        ((GOOD, STUCK, STUCK, GOOD, STUCK, STUCK), False),
        ((GOOD, STUCK, STUCK, AWAY, STUCK, STUCK), False),
        ((SILENT,) * 9, False),  # it is starting
        ((LOADING, *(SILENT,) * 9), False),
        ((LOADING, SILENT, SILENT, GOOD, SILENT, SILENT), False),
        ((LOADING, SILENT, GOOD, SILENT, SILENT, SILENT), True),
    ],
)
def test_three_bad_rounds_in_a_row_after_the_start_are_the_end(
    rounds: tuple[Health | None, ...], is_over: bool
) -> None:
    pulse = Pulse(limit=3)
    *before, last = [pulse.count_round(1.0, health, on_time=True) for health in rounds]
    assert not any(before)
    assert last is is_over


def test_a_round_that_the_supervisor_slept_through_does_not_count() -> None:
    pulse = Pulse(limit=2)
    assert not any(pulse.count_round(1.0, health, on_time=True) for health in (GOOD, SILENT))
    assert not any(pulse.count_round(1.0, SILENT, on_time=False) for _ in range(9))
    assert not pulse.count_round(1.0, SILENT, on_time=True)
    assert pulse.count_round(1.0, SILENT, on_time=True)


def test_the_next_life_begins_with_a_start() -> None:
    pulse = Pulse(limit=2)
    assert not any(pulse.count_round(1.0, health, on_time=True) for health in (GOOD, SILENT))
    assert not any(pulse.count_round(2.0, SILENT, on_time=True) for _ in range(9))


def test_a_start_may_take_its_time_but_not_any() -> None:
    pulse = Pulse(limit=2, start_s=10.0)
    for health in (AWAY, SILENT, LOADING):
        assert not pulse.count_round(1.0, health, on_time=True, age_s=10.0)
        assert not pulse.count_round(1.0, health, on_time=False, age_s=11.0)
        assert pulse.count_round(1.0, health, on_time=True, age_s=11.0)
    assert not pulse.count_round(1.0, GOOD, on_time=True, age_s=12.0)
    assert not pulse.count_round(1.0, SILENT, on_time=True, age_s=13.0)
    assert not pulse.count_round(2.0, SILENT, on_time=True, age_s=1.0)


def test_one_machine_is_as_patient_as_the_chart() -> None:
    objects = [each for each in yaml.safe_load_all(GOLDEN.read_text()) if each and each["kind"] == "Deployment"]
    containers = [each for found in objects for each in found["spec"]["template"]["spec"]["containers"]]
    probes = {each["command"][1]: each["livenessProbe"] for each in containers}
    rounds = {"router": ROUTER_ROUNDS, "prefill-worker": WORKER_ROUNDS, "decode-worker": WORKER_ROUNDS}
    assert {name: probe["failureThreshold"] for name, probe in probes.items()} == rounds
    starts = [each["startupProbe"] for name, each in zip(probes, containers, strict=True) if name != "router"]
    assert {probe["failureThreshold"] * probe["periodSeconds"] for probe in starts} == {ServeConfig().start_timeout_s}
    period_s = ServeConfig().liveness_s / WORKER_ROUNDS
    assert {(probe["periodSeconds"], probe["timeoutSeconds"]) for probe in probes.values()} == {(period_s, period_s)}


# ---------------------------------------------------------------- processes: real ones, which only answer probes

PROGRAM = """
import http.server, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        state = (folder / "state").read_text()
        self.send_response(503 if state == "stuck" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"state": state}).encode())
        with (folder / "asked").open("a") as record:
            record.write("x")
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
(folder / "new").write_text(str(server.server_port))
(folder / "new").rename(folder / "port")
server.serve_forever()
"""


class Probed(Child):
    """It answers with the state that its folder names."""

    def __init__(self, folder: Path, state: str) -> None:
        super().__init__(folder.name, "", RouterConfig())
        self.folder = folder
        folder.mkdir()
        self.become(state)

    def become(self, state: str) -> None:
        (self.folder / "state").write_text(state)

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-S", "-c", PROGRAM, str(self.folder)]

    def http_address(self) -> tuple[str, int] | None:
        port = self.folder / "port"
        return ("127.0.0.1", int(port.read_text())) if port.exists() else None

    async def was_heard(self) -> None:
        """Wait until the supervisor has counted an answer: it has asked again."""
        record = self.folder / "asked"
        await until(lambda: record.exists() and len(record.read_text()) >= 2)

    def freeze(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)


until = functools.partial(waiting.until, patience_s=30.0)


@asynccontextmanager
async def watched(child: Child, limit: int, period_s: float, start_s: float = 60.0) -> AsyncIterator[None]:
    child.start()
    watching = asyncio.create_task(watch(child, limit, period_s, grace_s=0.3, start_s=start_s))
    try:
        yield
        assert not watching.done()
    finally:
        watching.cancel()
        child.send_signal(signal.SIGKILL)
        await asyncio.gather(watching, child.ended(), return_exceptions=True)


@contextmanager
def hangs_said(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []
    yield found
    found += [record for record in caplog.records if record.getMessage().endswith(" is unresponsive, stopping it")]


@pytest.mark.slow
async def test_a_process_that_says_that_it_is_stuck_is_asked_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = Probed(tmp_path / "decode-0", "ready")
    with hangs_said(caplog) as said:
        async with watched(child, 4, 0.25), asyncio.timeout(30):
            await child.was_heard()
            child.become("stuck")
            assert await child.ended() == -signal.SIGTERM
    (record,) = (vars(record) for record in said)
    assert (record["child"], record["why"]) == ("decode-0", "HTTP 503: stuck")
    assert (record["for_s"], record["probes"]) == (1.0, 4)


async def test_a_frozen_process_is_killed_and_one_frozen_while_it_starts_is_not(tmp_path: Path) -> None:
    child, starting = Probed(tmp_path / "decode-0", "ready"), Probed(tmp_path / "decode-1", "loading")
    async with watched(child, 4, 0.25), watched(starting, 1, 0.25), asyncio.timeout(30):
        await child.was_heard()
        await starting.was_heard()
        starting.freeze()
        child.freeze()
        assert await child.ended() == -signal.SIGKILL
        assert starting.alive


async def test_a_slow_start_names_who_still_loads(tmp_path: Path) -> None:
    children = [Probed(tmp_path / f"decode-{i}", state) for i, state in enumerate(("loading", "ready", "stuck"))]
    silent = Probed(tmp_path / "decode-3", "loading")  # it has not told where it is
    async with AsyncExitStack() as running:
        for child in children:
            await running.enter_async_context(watched(child, 4, 30.0))
        for child in children:
            await until(lambda: child.http_address() is not None)  # noqa: B023 (awaited here)
        assert await loading([*children, silent], 10.0) == ["decode-0"]


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["while it loads", "before it tells where it is"])
async def test_a_process_that_does_not_start_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hangs: str
) -> None:
    child = Probed(tmp_path / "decode-1", "loading")
    if hangs != "while it loads":
        child.http_address = lambda: None  # type: ignore[method-assign]
    async with watched(child, 2, 0.1, start_s=1.0), asyncio.timeout(30):
        if hangs == "while it loads":
            await child.was_heard()
        child.freeze()
        assert await child.ended() == -signal.SIGKILL
    (record,) = (vars(each) for each in caplog.records if each.getMessage().endswith("in time, stopping it"))
    assert record["child"] == "decode-1" and record["for_s"] > 1.0


@pytest.mark.slow
async def test_no_process_is_ended_while_the_supervisor_itself_does_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = Probed(tmp_path / "decode-0", "ready")
    async with watched(child, 2, 0.1), asyncio.timeout(30):
        await child.was_heard()
        child.freeze()
        with hangs_said(caplog) as said:
            for turn in range(500):
                if turn % 50 == 0:
                    time.sleep(0.2)  # noqa: ASYNC251 (as if this process were stopped, too)
                await asyncio.sleep(0)
        assert not said
        assert await child.ended() == -signal.SIGKILL  # both run again, and it still hangs


@pytest.mark.slow
async def test_ending_a_process_leaves_the_next_one_alone(tmp_path: Path) -> None:
    child = Probed(tmp_path / "decode-0", "ready")
    child.start()
    ending = asyncio.create_task(child.end(grace_s=0.0))
    assert await child.ended() < 0
    child.start()
    await ending
    assert child.alive
    await child.end(grace_s=30)
    assert not child.alive


# ---------------------------------------------------------------- one probe


@asynccontextmanager
async def answering(reply: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("reply", [b"", b"\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"x" * 100_000])
async def test_who_does_not_speak_http_is_not_well(reply: bytes) -> None:
    async with answering(reply) as port:
        health = await ask_health(("127.0.0.1", port), 30)
    assert health.problem.startswith("no answer: ") and not health.has_started


async def test_who_is_away_is_not_well() -> None:
    health = await ask_health(("127.0.0.1", claim_port("127.0.0.1", 0)), 30)
    assert health.problem.startswith("no answer: ")


async def test_a_router_with_a_certificate_is_asked_all_the_same() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("example.org").configure_cert(context)
    async with answering(b'HTTP/1.1 503 Oh\r\n\r\n{"error": {"message": "a task died"}}', context) as port:
        assert await ask_health(("127.0.0.1", port), 30, tls=True) == Health("HTTP 503: a task died", True)
