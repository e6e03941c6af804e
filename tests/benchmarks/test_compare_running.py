"""An engine's processes: started, waited for, ended with their children."""

import sys
import time
from pathlib import Path

import httpx
import pytest

from diptych.benchmarks.peers.peer import Launch, PeerError, Process
from diptych.benchmarks.peers.running import RunningEngine
from diptych.benchmarks.stack import free_port

from .fake_engine import fake_process


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
        models = httpx.get(f"{launch.url}/v1/models", trust_env=False).json()
    assert models["data"][0]["id"] == "model"
    deadline = time.monotonic() + 30
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


def test_a_bad_request_is_answered(tmp_path: Path) -> None:
    launch = fake_process(tmp_path, free_port())
    with RunningEngine(launch, tmp_path / "logs", 60):
        answer = httpx.post(f"{launch.url}/v1/completions", content=b"{}", trust_env=False)
        absent = httpx.get(f"{launch.url}/absent", trust_env=False)
    assert (answer.status_code, absent.status_code) == (400, 404)
    assert "prompt" in answer.json()["error"]["message"]
