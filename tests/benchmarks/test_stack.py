import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stack import Stack, StackError, StackProcess, StackSettings, free_port

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
ADDRESSES = """
import pathlib, sys, time
file = pathlib.Path(sys.argv[1])
file.with_suffix(".new").write_text('{"http": "127.0.0.1:9"}')
file.with_suffix(".new").replace(file)
time.sleep(60)
"""


def spawn(folder: Path, code: str, *argv: str) -> StackProcess:
    process = StackProcess("some", "decode", [sys.executable, "-c", code, *argv], folder / "some.log")
    process.start()
    return process


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[StackProcess]:
    process = spawn(tmp_path, "import time; time.sleep(60)")
    yield process
    process.kill()


def wait_for(process: StackProcess, text: str) -> None:
    while text not in process.log_tail():
        assert process.alive
        time.sleep(0.01)


def test_an_obedient_process_ends_unforced(sleeper: StackProcess) -> None:
    sleeper.stop()
    assert (sleeper.alive, sleeper.returncode, sleeper.forced) == (False, -signal.SIGTERM, False)


def test_a_paused_process_ends_too(sleeper: StackProcess) -> None:
    sleeper.pause()
    sleeper.stop()
    assert not sleeper.forced


def test_a_stubborn_process_is_forced(tmp_path: Path) -> None:
    process = spawn(tmp_path, STUBBORN)
    wait_for(process, "up")
    process.terminate()
    process.wait(time.monotonic() + 0.05)
    assert (process.returncode, process.forced) == (-signal.SIGKILL, True)


def test_kill(sleeper: StackProcess) -> None:
    sleeper.kill()
    assert sleeper.returncode == -signal.SIGKILL


def test_addresses_are_read_once_written(tmp_path: Path) -> None:
    process = spawn(tmp_path, ADDRESSES, str(tmp_path / "some.json"))
    process.wait_for_addresses(time.monotonic() + 30)
    assert process.http_url == "http://127.0.0.1:9"
    process.kill()


def test_a_process_that_dies_is_an_error_with_its_log(tmp_path: Path) -> None:
    process = spawn(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(StackError, match=r"status 1\nno such model"):
        process.wait_for_addresses(time.monotonic() + 30)


def test_a_process_that_is_silent_is_an_error(sleeper: StackProcess) -> None:
    with pytest.raises(StackError, match="no address file in time"):
        sleeper.wait_for_addresses(time.monotonic() + 0.05)


def test_no_port_is_given_twice() -> None:
    assert len({free_port() for _ in range(50)}) == 50


@pytest.mark.slow
def test_nothing_survives_a_stack_that_cannot_start(tmp_path: Path) -> None:
    stack = Stack(
        StackSettings(prefill=0, model=str(tmp_path / "absent"), log_dir=tmp_path / "logs", ready_timeout_s=60)
    )
    with pytest.raises(StackError):
        stack.start()
    assert not any(process.alive for process in (*stack.processes, stack.router))
