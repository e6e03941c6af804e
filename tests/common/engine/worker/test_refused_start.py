"""A worker whose model does not fit refuses to start, as a real process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from triton.runtime.errors import OutOfResources

from common.config import DecodeWorkerConfig
from common.engine.run import loaded, memory_need
from common.engine.run.loaded import LoadedModel
from common.engine.worker import process
from common.engine.worker.loop_model import LoopModel
from common.errors import ConfigError, ModelError, Unavailable
from common.machine.memory import Available
from common.model_files.resolve import resolve_model
from common.wire import bind

LIMITED = """
import sys
from common.machine.memory import Available
from common.engine.run import memory_need
memory_need.host_memory = lambda: Available(300 * 2**20, "a limit of this test")
from decode_worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""A worker on a host that has 300 MiB left."""


TOO_LARGE = """
import sys
from triton.runtime.errors import OutOfResources
from common.engine.run.loaded import LoadedModel

def load(*_):
    raise OutOfResources(102_400, 101_376, "shared memory")

LoadedModel.load = load
from decode_worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""A worker on a GPU for which a kernel's tiles are too large: Triton says so at the first launch."""


def start(*flags: str, program: str = LIMITED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, "--model", "tiny-random", "--dtype", "float32", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_that_does_not_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_need, "host_memory", lambda: Available(300 * 2**20, "a limit of this test"))
    monkeypatch.setattr(loaded, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    files, config = resolve_model("tiny-random"), DecodeWorkerConfig(model="tiny-random", quantization="int8")
    with pytest.raises(ModelError, match=r"in total at least 1\.25 GiB; 0\.29 GiB available on cpu \(a limit of"):
        LoadedModel.load(files, config)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("name", ["kv_port", "lend_port"])
def test_a_port_in_use_is_named(busy_port: int, name: str) -> None:
    ports: dict[str, Any] = {"kv_port": 1, "lend_port": 2, name: busy_port}
    config = DecodeWorkerConfig(model="tiny-random", **ports)
    free = r"must be a port that is free on 127\.0\.0\.1 \(address already in use\)"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        refused = pytest.raises(ConfigError, match=f"{name}={busy_port}: {free}")
        with refused, process._refusing(config, "kv_port", "lend_port"):
            bind(bound, "127.0.0.1", busy_port)


@pytest.mark.parametrize("port", [0, 1234])
def test_a_host_of_another_machine_is_named(port: int) -> None:
    config = DecodeWorkerConfig(model="tiny-random", port=port)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        refused = pytest.raises(ConfigError, match="host=.*: must be an address of this machine")
        with refused, process._refusing(config, "port"):
            bind(bound, "192.0.2.1", port)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--port", "--kv-port", "--http-port"])
def test_a_worker_whose_port_is_in_use_ends_with_2(busy_port: int, flag: str) -> None:
    ended = start(flag, str(busy_port))
    assert ended.returncode == 2
    assert f"cannot start: invalid {flag} {busy_port}: must be a port that is free" in ended.stderr


@pytest.mark.slow
def test_it_names_what_it_needs_and_what_there_is(repository: Path) -> None:
    ended = start("--quantization", "int8")
    assert ended.returncode == 2, ended.stderr
    assert "cannot start: tiny-random does not fit in memory (no weights were read): weights take 0.00 GiB, " in (
        ended.stderr
    )
    assert "KV 1.00 GiB, steps and the rest 0.25 GiB, in total at least 1.25 GiB; 0.29 GiB available on cpu (" in (
        ended.stderr
    )
    assert "(a limit of this test). Provide more memory, or use --quantization int4, or --kv-memory-gib below 1" in (
        ended.stderr
    )
    assert "of weights from" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [2])
def test_ranks_of_a_host_share_its_memory(size: int) -> None:
    ended = start("--tensor-parallel-size", str(size), "--num-blocks", "64")
    assert ended.returncode == 2, ended.stderr
    assert f"in {size} ranks, KV " in ended.stderr
    assert "steps and the rest 0.50 GiB" in ended.stderr


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_is_a_sentence() -> None:
    """And a worker that is started by itself says where it runs."""
    ended = start(program=TOO_LARGE)
    assert ended.returncode == 2, ended.stderr
    assert (
        "Traceback" not in ended.stderr
        and ("cannot start: a kernel needs 102,400 bytes of shared memory, but this GPU has 101,376; --device cpu runs")
        in ended.stderr
    )
    assert "--device auto: " in ended.stderr


def test_a_kernel_that_does_not_fit_is_an_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise OutOfResources(102_400, 101_376, "shared memory")

    monkeypatch.setattr(LoadedModel, "load", load)
    with pytest.raises(
        ModelError, match="a kernel needs 102,400 bytes of shared memory, but this GPU has 101,376; --dev"
    ):
        LoopModel.load(resolve_model("tiny-random"), DecodeWorkerConfig(model="tiny-random"))


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the settings of this process, which a worker changes before it starts."""
    for owner, name in ((process, "keep_large_buffers"), (process, "raise_file_limit"), (sys, "setswitchinterval")):
        monkeypatch.setattr(owner, name, lambda *_: None)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ModelError("no config.json"), 2, "cannot start: no config.json"),
        (ConfigError("kv_transport", "nixl", "tcp"), 2, "cannot start: invalid --kv-transport nixl: must be tcp"),
        (Unavailable("no store"), 1, "stopped by an error: no store"),
        (OSError("port in use"), 1, "stopped by an error: port in use"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.usefixtures("unchanged")
def test_the_exit_status_of_an_error(
    caplog: pytest.LogCaptureFixture, error: Exception, status: int, words: str
) -> None:
    def start() -> process.WorkerProcess:
        raise error

    assert process.run_worker(start) == status
    assert words in caplog.text


@pytest.mark.usefixtures("unchanged")
def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        process.run_worker(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
