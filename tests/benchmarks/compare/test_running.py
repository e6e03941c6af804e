"""An engine's processes: started, waited for, ended with their children."""

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.compare.engines import Engine
from benchmarks.compare.peer import Launch, PeerError, Process
from benchmarks.compare.ratios import Load
from benchmarks.compare.rounds import measure
from benchmarks.compare.running import RunningEngine, family, proportional_bytes
from benchmarks.load.summary import Summary
from benchmarks.stack import free_port

from ...rig import Program
from ..fake_engine import fake_process


def run(*argv: str, ready: str = "http://127.0.0.1:9/health") -> Launch:
    return Launch("", (Process("some", argv, ready, {"WORD": "spoken"}),))


def is_alive(pid: int) -> bool:
    """A process that has ended may stay in the table until its new parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_and_its_children_end_with_the_block(tmp_path: Path) -> None:
    launch = fake_process(tmp_path, free_port())
    with RunningEngine(launch, tmp_path / "logs", 60) as running:
        child = int((tmp_path / "child.pid").read_text())
        assert is_alive(child)
        assert running.start_s > 0
        assert child in family(os.getpid())
        assert running.memory_bytes() >= proportional_bytes(child) > 2**18
        models = httpx.get(f"{launch.url}/v1/models", trust_env=False, timeout=60).json()
    assert models["data"][0]["id"] == "model"
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_dies_is_an_error_with_its_log(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(os.environ['WORD'] + os.environ['PYTHONSAFEPATH'])"
    with (
        pytest.raises(PeerError, match=r"status 1\nspoken1"),
        RunningEngine(run(sys.executable, "-c", program), tmp_path, 60),
    ):
        pass


@pytest.mark.slow
def test_a_process_that_is_never_ready_is_an_error_and_ended(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with (
        pytest.raises(PeerError, match="not ready after 1 s"),
        RunningEngine(run(sys.executable, "-c", program), tmp_path, 1),
    ):
        pass
    if (tmp_path / "pid").exists():  # else it was ended before it came so far
        assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot be started"), RunningEngine(run("/absent/engine"), tmp_path, 1):
        pass


# One process that takes requests and never answers, one that ends with the first of them.
SILENT = """
import http.server, pathlib, sys, threading
class Silent(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        pathlib.Path(sys.argv[2]).touch()
        threading.Event().wait()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Silent).serve_forever()
"""
DOOMED = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit("no memory is left")
"""


def test_a_load_ends_with_the_process_that_should_serve_it(tmp_path: Path) -> None:
    port, asked = free_port(), str(tmp_path / "asked")
    url = f"http://127.0.0.1:{port}"
    front = Process("front", (sys.executable, "-c", SILENT, str(port), asked), f"{url}/health")
    worker = Process("worker", (sys.executable, "-c", DOOMED, asked), f"{url}/health")
    engine = Engine("pair", lambda _: Launch(url, (front, worker), model="m"), {})
    options = Namespace(ready_timeout_s=60, request_timeout_s=60, open_loop_s=60, max_s=60, per_user=2, min_requests=2)
    summaries: list[Summary] = []
    with pytest.raises(PeerError, match=r"worker exited with status 1\nno memory is left"):
        measure(engine, [Load(4, 3, 2)], (5, 6), options, 1, tmp_path / "logs", lambda _, s: summaries.append(s))
    assert not summaries


async def test_work_during_which_nothing_ends_is_done(tmp_path: Path) -> None:
    with RunningEngine(fake_process(tmp_path, free_port()), tmp_path / "logs", 60) as running:
        assert await running.during(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ZeroDivisionError):
            await running.during(fails())


async def fails() -> float:
    return 1 / 0


def test_a_bad_request_is_answered(tmp_path: Path) -> None:
    launch = fake_process(tmp_path, free_port())
    with RunningEngine(launch, tmp_path / "logs", 60):
        answer = httpx.post(f"{launch.url}/v1/completions", content=b"{}", trust_env=False, timeout=60)
        absent = httpx.get(f"{launch.url}/absent", trust_env=False, timeout=60)
    assert (answer.status_code, absent.status_code) == (400, 404)
    assert "prompt" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_comparison_that_is_told_to_end_ends_what_it_started(launch: Callable[..., Program]) -> None:
    flags = ("--model=tiny-random", "--workload=16/4", "--concurrency=1", "--max-s=100", "--per-user=100000")
    comparing = launch(sys.executable, "-P", "-m", "benchmarks.compare", "--diptych", "own=", *flags)
    started: list[psutil.Process] = []
    deadline = time.monotonic() + 100
    while len(started) < 4:  # `diptych serve`, router, prefill and decode worker
        assert comparing.alive and time.monotonic() < deadline, comparing.output()
        started = psutil.Process(comparing.pid).children(recursive=True)
        time.sleep(0.05)
    comparing.stop(60)
    assert comparing.returncode and not comparing.forced
    assert "told to end" in comparing.output()
    assert not psutil.wait_procs(started, timeout=30)[1]
