from __future__ import annotations

import asyncio
import errno
import functools
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from benchmarks.stack import free_port
from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig, ServeConfig
from common.config.field import fields_of, to_argv
from common.errors import ConfigError
from router.cli.serve import keeper as keeper_module
from router.cli.serve import serve as serve_module
from router.cli.serve import supervisor as supervisor_module
from router.cli.serve.child import Child, child_environment
from router.cli.serve.keeper import Keeper, StartFailed, describe_exit
from router.cli.serve.probe import claim_port, ready_reason
from router.cli.serve.processes import ROUTER_OWN, WORKER_OWN, ServePlan, build_parser, read_plan
from router.cli.serve.serve import main, supervise
from router.cli.serve.supervisor import Supervisor

from .... import waiting

# ---------------------------------------------------------------- the plan


def plan_of(*argv: str, **environ: str) -> ServePlan:
    return read_plan(argv, environ, num_cores=8, num_gpus=0)


def models_file(folder: Path, *models: str) -> str:
    """The flag that names a file of these models."""
    file = folder / "models.toml"
    file.write_text("".join(f'[[model]]\nmodel = "{model}"\n' for model in models))
    return f"--models-file={file}"


def test_the_default_is_one_of_each() -> None:
    plan = plan_of()
    assert [worker.worker_id for worker in (*plan.prefill, *plan.decode)] == ["prefill-0", "decode-0"]
    assert plan.prefill[0].threads == plan.decode[0].threads == 8


def test_no_prefill_worker_is_a_plan() -> None:
    plan = plan_of("--prefill", "0", "--decode", "2")
    assert (plan.prefill, len(plan.decode), plan.decode[1].threads) == ((), 2, 8)


def test_an_option_reaches_every_process_that_has_it() -> None:
    plan = plan_of("--model", "tiny-random", "--block-size", "64", "--max-retries", "1", "--watermark=0.1")
    assert {plan.router.model, plan.prefill[0].model, plan.decode[0].model} == {"tiny-random"}
    assert (plan.prefill[0].block_size, plan.decode[0].block_size) == (64, 64)
    assert (plan.router.max_retries, plan.decode[0].watermark) == (1, 0.1)


@pytest.mark.slow
def test_workers_of_one_gpu_share_its_memory_and_leave_prompts_to_prefill_workers() -> None:
    """A prompt in a decode step would have it run kernel by kernel instead of as a recorded graph."""
    plan = plan_of("--device", "cuda", "--decode", "2")
    assert [one.gpu_memory_utilization for one in (*plan.prefill, *plan.decode)] == pytest.approx([0.3] * 3)
    assert plan.router.local_prefill_threshold == 0
    apart = plan_of("--prefill-device", "cuda:0", "--decode-device", "cuda:1", "--local-prefill-threshold", "9")
    assert (apart.prefill[0].gpu_memory_utilization, apart.decode[0].gpu_memory_utilization) == (0.9, 0.9)
    assert apart.router.local_prefill_threshold == 9
    assert plan_of("--device", "cuda", DIPTYCH_LOCAL_PREFILL_THRESHOLD="7").router.local_prefill_threshold == 7
    assert plan_of().router.local_prefill_threshold == RouterConfig().local_prefill_threshold > 0


def test_an_option_for_one_pool_wins() -> None:
    plan = plan_of("--cores", "0-1", "--decode-cores", "2", "--decode-threads", "3")
    assert (plan.prefill[0].cores, plan.decode[0].cores) == ("0-1", "2")
    assert (plan.prefill[0].threads, plan.decode[0].threads) == (0, 3)  # 0: all cores that it is pinned to


def test_file_and_environment_reach_the_children(tmp_path: Path) -> None:
    file = tmp_path / "diptych.toml"
    file.write_text("[serve]\ndecode = 2\n[decode_worker]\nmax_num_seqs = 5\nport = 7002\n")
    plan = plan_of("--config", str(file), DIPTYCH_PREFILL_MAX_NUM_SEQS="7", DIPTYCH_SERVE_PREFILL="0")
    assert (len(plan.prefill), len(plan.decode), plan.decode[1].max_num_seqs) == (0, 2, 5)
    assert plan.decode[0].port == 0  # two workers cannot share the file's port


def test_several_models_have_workers_each_and_one_router(tmp_path: Path) -> None:
    plan = plan_of(models_file(tmp_path, "a", "b", "c"), "--prefill", "2", "--block-size", "64")
    assert plan.models == ("a", "b", "c")
    assert [(worker.worker_id, worker.model) for worker in plan.prefill] == [
        ("prefill-0", "a"), ("prefill-1", "a"), ("prefill-2", "b"), ("prefill-3", "b"), ("prefill-4", "c"),
        ("prefill-5", "c"),
    ]  # fmt: skip
    assert [(worker.worker_id, worker.model, worker.block_size) for worker in plan.decode] == [
        ("decode-0", "a", 64), ("decode-1", "b", 64), ("decode-2", "c", 64),
    ]  # fmt: skip


def test_a_file_of_models_is_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[[model]]\nmodel = "a"\nname = "x"\n[[model]]\nmodel = "b"\n')
    plan = plan_of("--models-file", str(file))
    assert plan.models == tuple(worker.model for worker in plan.decode) == ("a", "b")
    assert f"--models-file={file}" in to_argv(plan.router)


def test_one_pool_cannot_have_a_list_of_models() -> None:
    with pytest.raises(ConfigError, match="option --decode-model is given 2 times"):
        plan_of("--model", "a", "--decode-model", "b", "--decode-model", "c")


def test_a_model_without_a_prefill_pool_gets_no_prefill_workers(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[[model]]\nmodel = "a"\nprefill = false\n[[model]]\nmodel = "b"\n')
    plan = plan_of("--models-file", str(file), "--prefill", "2")
    assert [(worker.worker_id, worker.model) for worker in plan.prefill] == [("prefill-0", "b"), ("prefill-1", "b")]
    assert [worker.model for worker in plan.decode] == ["a", "b"]


@pytest.mark.parametrize("argv", ["--decode=0", "--prefil=1", "--kv-port=1", "--decode-block-size=5"])
def test_a_bad_plan_is_refused(argv: str) -> None:
    with pytest.raises(ConfigError):
        plan_of(argv)


def test_serve_takes_every_option_of_every_process() -> None:
    flags = set(build_parser()._option_string_actions)
    for cls in (RouterConfig, PrefillWorkerConfig, DecodeWorkerConfig, ServeConfig):
        assert {field.flag for field in fields_of(cls) if field.name not in WORKER_OWN | ROUTER_OWN} <= flags


def test_settings_travel_as_flags_and_secrets_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("DIPTYCH_CACHE", "/cache")
    monkeypatch.setenv("DIPTYCH_MARCH", "x86-64-v3")
    plan = plan_of("--api-key", "hush")
    environ = {name: text for name, text in child_environment(plan.router).items() if name.startswith("DIPTYCH_")}
    kept = {"DIPTYCH_CACHE": "/cache", "DIPTYCH_MARCH": "x86-64-v3"}
    assert environ == kept | {"DIPTYCH_ROUTER_API_KEY": "hush"}
    assert "hush" not in " ".join(to_argv(plan.router))


def test_workers_that_may_change_their_role_know_the_settings_of_the_other(tmp_path: Path) -> None:
    flags = ("--prefill-max-num-seqs", "5", "--decode-max-num-seqs", "7")

    def environments(*more: str) -> list[dict[str, str]]:
        supervisor = Supervisor(plan_of(*flags, *more), ["tiny-random"], tmp_path)
        known = (worker.environment() for worker in supervisor.workers)
        return [{name: text for name, text in each.items() if name.startswith("DIPTYCH_")} for each in known]

    assert environments("--role-change") == [
        {"DIPTYCH_DECODE_MAX_NUM_SEQS": "7"},
        {"DIPTYCH_PREFILL_MAX_NUM_SEQS": "5"},
    ]
    assert environments() == [{}, {}]


# ---------------------------------------------------------------- ports


def test_a_port_in_use_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["--port", str(port)])
    assert caught.value.code == 2
    assert f"must be a free port, but 127.0.0.1:{port}" in capsys.readouterr().err


def test_port_zero_becomes_a_free_one() -> None:
    assert claim_port("127.0.0.1", 0) > 0


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host"):
        claim_port("203.0.113.7", 0)


# ---------------------------------------------------------------- processes: real ones, which only pretend to serve

WORKER = """
import json, os, pathlib, signal, socket, sys, time
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:] if "=" in flag)
folder = pathlib.Path(os.environ["RECORDS"])
socket_ = socket.socket(fileno=os.dup(0))
with (folder / flags["worker-id"]).open("a") as record:
    record.write(f"{os.getpid()} {socket_.getsockname()[1]}\\n")
if flags.get("max-waiting") == "7":
    sys.exit(3)
if flags.get("max-waiting") == "9":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = pathlib.Path(flags["address-file"])
address = "://127.0.0.1:%d" % socket_.getsockname()[1]
file.with_suffix(".tmp").write_text(json.dumps({"address": "tcp" + address, "http": "http" + address}))
file.with_suffix(".tmp").rename(file)
time.sleep(600)
"""

ROUTER = """
import http.server, os, pathlib, socket, sys
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:] if "=" in flag)
folder = pathlib.Path(os.environ["RECORDS"])
(folder / "router").write_text(" ".join(sys.argv[1:]))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with (folder / "asked").open("a") as record:
            record.write(self.path)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(flags["port"])), Ready, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(fileno=os.dup(0))
server.socket.setblocking(True)
server.serve_forever()
"""


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake processes' records; their modules are on the children's path."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "pretended_worker.py").write_text(WORKER)
    (modules / "pretended_router.py").write_text(ROUTER)
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    monkeypatch.setenv("RECORDS", str(tmp_path))
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.05)
    return tmp_path


def pretended(tmp_path: Path, *argv: str) -> Supervisor:
    plan = plan_of("--port", str(free_port()), *argv)  # none that an outgoing connection may take meanwhile
    supervisor = Supervisor(plan, plan.models, tmp_path)
    for worker in (*supervisor.prefill, *supervisor.decode):
        worker.module = "pretended_worker"
    supervisor.router.module = "pretended_router"
    return supervisor


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


until = functools.partial(waiting.until, patience_s=30.0)


async def test_everything_starts_and_everything_ends(records: Path) -> None:
    supervisor = pretended(records, "--prefill", "2")
    await supervisor.start()
    pids = [child.pid for child in supervisor.children]
    given = (records / "router").read_text()
    assert given.count("tcp://127.0.0.1:") == 3
    supervisor.stop()
    await supervisor.run()
    assert not any(pid and is_running(pid) for pid in pids)


async def test_a_worker_that_dies_comes_back_on_its_address_which_nobody_can_take(records: Path) -> None:
    supervisor = pretended(records, "--prefill", "0")
    await supervisor.start()
    running = asyncio.create_task(supervisor.run())
    port = int(supervisor.decode[0].read_address().rpartition(":")[2])
    supervisor.decode[0].send_signal(signal.SIGKILL)
    await supervisor.decode[0].ended()
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
    await until(lambda: (records / "decode-0").read_text().count("\n") == 2)
    supervisor.stop()
    await running
    (first_pid, first_port), (second_pid, second_port) = (
        line.split() for line in (records / "decode-0").read_text().splitlines()
    )
    assert first_pid != second_pid
    assert first_port == second_port


@pytest.mark.slow
async def test_a_child_that_cannot_be_spawned_now_is_spawned_later(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without memory or processes for one worker must not end the others."""
    supervisor = pretended(records, "--prefill", "0")
    await supervisor.start()
    running = asyncio.create_task(supervisor.run())
    decode, failures = supervisor.decode[0], [errno.EAGAIN, errno.ENOMEM]
    start = decode.start

    def start_or_fail() -> None:
        if failures:
            code = failures.pop()
            raise OSError(code, os.strerror(code))
        start()

    monkeypatch.setattr(decode, "start", start_or_fail)
    decode.send_signal(signal.SIGKILL)
    await until(lambda: running.done() or (records / "decode-0").read_text().count("\n") == 2)
    assert supervisor.router.alive
    supervisor.stop()
    await running


@pytest.mark.slow
async def test_a_router_that_hangs_is_replaced(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.2)
    supervisor = pretended(records, "--prefill", "0", "--liveness-s", "1.8")
    await supervisor.start()
    frozen = supervisor.router.pid
    running = asyncio.create_task(supervisor.run())
    await until(lambda: (records / "asked").read_text().count("/health") >= 2)
    with pytest.raises(ConfigError, match="is in use; try --port"):
        claim_port(supervisor.router.config.host, supervisor.router.config.port)
    supervisor.router.send_signal(signal.SIGSTOP)
    await until(lambda: supervisor.router.alive and supervisor.router.pid != frozen)
    supervisor.stop()
    await running
    assert not any(child.alive for child in supervisor.children)


@pytest.mark.slow
async def test_hanging_processes_may_be_left_alone(records: Path) -> None:
    supervisor = pretended(records, "--prefill", "0", "--liveness-s", "0")
    await supervisor.start()
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    names = {task.get_name() for task in asyncio.all_tasks()}
    supervisor.stop()
    await running
    assert "keep router" in names and not any(name.startswith("watch ") for name in names)


@pytest.mark.parametrize(("status", "of_service"), [(2, 2), (3, 1), (-9, 1)])
async def test_what_a_worker_refuses_is_refused_by_the_service(status: int, of_service: int) -> None:
    async def ended() -> int:
        return status

    child: Any = SimpleNamespace(name="decode-0", ended=ended)
    keeper: Any = SimpleNamespace(stopping=asyncio.Event())
    with pytest.raises(StartFailed, match="^decode-0 exited during startup") as failed:
        await Keeper.unless_stopped(keeper, asyncio.sleep(60), [child])
    assert failed.value.status == of_service


@pytest.mark.slow
async def test_a_worker_that_cannot_start_ends_the_service(records: Path) -> None:
    supervisor = pretended(records, "--decode-max-waiting", "7")
    with pytest.raises(StartFailed, match=r"decode-0 exited during startup \(exit status 3\)"):
        await supervisor.start()
    await supervisor.shutdown()
    assert not any(child.alive for child in supervisor.children)


@pytest.mark.slow
async def test_a_process_that_ignores_the_request_is_killed(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.2)
    supervisor = pretended(records, "--decode-max-waiting", "9")
    await supervisor.start()
    await supervisor.shutdown()
    assert not any(child.alive for child in supervisor.children)


@pytest.mark.slow
async def test_stopping_while_starting_ends_at_once(records: Path) -> None:
    supervisor = pretended(records)
    supervisor.stop()
    await supervisor.start()
    await supervisor.shutdown()
    assert not any(child.alive for child in supervisor.children)


@pytest.mark.slow
async def test_a_signal_that_comes_twice_at_once_is_one(records: Path) -> None:
    supervisor = pretended(records)
    await supervisor.start()
    supervisor.stop()
    supervisor.stop()  # `make serve` passes on to its child a signal that its whole group got
    await supervisor.run()
    assert [await child.ended() for child in supervisor.children] == [-signal.SIGTERM] * 3


async def test_a_service_that_stops_refuses_connections_at_once(records: Path) -> None:
    supervisor = pretended(records, "--prefill", "0")
    await supervisor.start()
    supervisor.router.kill()
    supervisor.stop()
    assert claim_port(supervisor.router.config.host, port := supervisor.router.config.port) == port
    await supervisor.run()


class FullOutput(io.StringIO):
    """Standard output into a file on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_service_whose_output_cannot_be_written_serves(
    records: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = pretended(records, "--prefill", "0")
    monkeypatch.setattr(serve_module, "Supervisor", lambda *_: supervisor)
    monkeypatch.setattr(sys, "stdout", FullOutput())
    serving = asyncio.create_task(supervise(supervisor.plan, ["tiny-random"], records))
    await until(lambda: serving.done() or "cannot write to standard output" in caplog.text)
    assert not serving.done() and supervisor.router.alive
    supervisor.stop()
    assert await serving == 0


async def test_a_port_that_is_taken_meanwhile_ends_the_start(records: Path) -> None:
    supervisor = pretended(records, "--prefill", "0")
    with socket.create_server(("127.0.0.1", port := supervisor.plan.router.port)):
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await supervisor.start()
        await supervisor.shutdown()


@pytest.mark.slow
async def test_a_second_signal_does_not_wait(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "ECHO_S", 0.0)
    supervisor = pretended(records, "--decode-max-waiting", "9")  # its decode worker ignores SIGTERM
    await supervisor.start()
    supervisor.stop()
    supervisor.stop()
    await supervisor.run()
    assert await supervisor.decode[0].ended() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signals are Linux's")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, time\n"
        "from router.cli.serve.child import Child\n"
        "from common.config import RouterConfig\n"
        "async def main():\n"
        "    child = Child('idle', 'idle', RouterConfig())\n"
        "    child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    (tmp_path / "idle.py").write_text("import time\ntime.sleep(600)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    asyncio.run(until(lambda: not is_running(child)))


async def test_ready_reason_names_what_is_wrong() -> None:
    assert "does not answer" in await ready_reason("127.0.0.1", claim_port("127.0.0.1", 0))


def test_exits_are_described() -> None:
    assert describe_exit(2) == "exit status 2"
    assert describe_exit(-9) == "killed by signal 9 (Killed)"


def test_a_child_keeps_the_working_folder_off_its_path() -> None:
    command = Child("router", "router", RouterConfig(port=0)).command()
    assert command == [sys.executable, "-P", "-m", "router", "--port=0"]


# ---------------------------------------------------------------- files of the router

ROUTER_FILES = [
    field.name for field in fields_of(RouterConfig) if field.rule.metavar == "FILE" and field.name not in ROUTER_OWN
]
"""A setting that names a file is in this list when it is declared, so it cannot be forgotten."""


def refused_before_any_process(argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `diptych serve` until it exits with status 2, which must be before a process starts."""

    def started(*_: object) -> NoReturn:
        raise AssertionError("a process would start before the files of the router are validated")

    monkeypatch.setattr(serve_module, "Supervisor", started)
    monkeypatch.setattr(serve_module, "setup_logging", lambda *_: None)  # its handler would outlive the test's stderr
    with pytest.raises(SystemExit) as caught:
        main(["--port=0", "--response-store=off", *argv])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", ROUTER_FILES)
def test_a_missing_file_is_refused_before_a_process_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "folder" / "missing"
    flags = {f"--{name.replace('_', '-')}": missing}
    if name.startswith("tls_"):
        certificate = tmp_path / "cert.pem"
        certificate.write_text("-----BEGIN CERTIFICATE-----\n")
        flags = {"--tls-cert": certificate, "--tls-key": missing, **flags}
    model = [] if name == "models_file" else ["--model=tiny-random"]
    refused_before_any_process([*model, *(f"{flag}={file}" for flag, file in flags.items())], monkeypatch)
    assert f"invalid --{name.replace('_', '-')} {missing}: " in capsys.readouterr().err


def test_an_adapter_file_with_the_name_of_the_model_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "adapters.toml"
    file.write_text('[[adapter]]\nname = "tiny-random"\npath = "/adapters/sql"\n')
    refused_before_any_process(["--model=tiny-random", f"--lora-file={file}"], monkeypatch)
    assert "unlike 'tiny-random'" in capsys.readouterr().err
