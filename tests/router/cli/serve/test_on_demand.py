"""Workers of models that the router wants, with processes that only pretend to serve."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import DecodeWorkerConfig
from common.errors import ConfigError
from common.model_files.summary import ModelSummary
from router.cli.serve.child import MAX_PART_BYTES, LastLine, WorkerChild
from router.cli.serve.processes import read_plan
from router.cli.serve.supervisor import Supervisor
from router.planner.on_demand import BYTES_PER_GIB, ModelReport, OnDemandFolder, Wanted, WantedModel, WorkerMemory

from .test_serve import pretended, records, until  # noqa: F401 (records is a fixture)

FAILING = """
import sys
print("a line before", file=sys.stderr)
sys.exit("the file is damaged")
"""
PAIR = {"prefill": 1, "decode": 1}
MODEL = ModelSummary("llama", 10**9, "bfloat16", "", 2 * 10**9, 1000, 0)


class Service:
    """A supervisor that runs, and what its router wants."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self.supervisor, self.exchange = supervisor, OnDemandFolder(folder)

    def want(self, *models: WantedModel) -> None:
        self.exchange.write_wanted(Wanted(models))

    def reported(self) -> dict[str, ModelReport]:
        return {one.model: one for one in self.exchange.report().models}

    async def ready(self, model: str) -> ModelReport:
        """The report of a model once all its workers have addresses."""
        await until(lambda: (one := self.reported().get(model)) and one.prefill and one.decode)
        return self.reported()[model]

    def workers(self) -> list[WorkerChild]:
        return list(self.supervisor.pools)


@pytest.fixture
async def service(records: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:  # noqa: F811
    monkeypatch.setattr("router.cli.serve.autoscale.MODULES", dict.fromkeys(PAIR, "pretended_worker"))
    (records / "modules" / "failing_worker.py").write_text(FAILING)
    supervisor = pretended(records, "--on-demand")
    await supervisor.start()
    assert not list(supervisor.pools)
    running = asyncio.create_task(supervisor.run())
    yield Service(supervisor, records)
    supervisor.stop()
    await running


async def test_workers_start_and_end_as_the_router_wants(service: Service) -> None:
    service.want(WantedModel("a", 1, PAIR))
    first = await service.ready("a")
    assert first.load == 1
    assert {worker.config.model for worker in service.workers()} == {"a"}
    service.want(WantedModel("a", 1, PAIR, is_ready=True), WantedModel("b", 2, {"prefill": 0, "decode": 1}))
    await until(lambda: len(service.workers()) == 3)
    pid = next(worker.pid for worker in service.workers() if worker.config.model == "a")
    await asyncio.sleep(0.3)
    os.kill(pid, signal.SIGKILL)  # of a loaded model: it is restarted
    await until(lambda: pid not in [worker.pid for worker in service.workers()])
    service.want(WantedModel("b", 2, {"prefill": 0, "decode": 1}))
    await until(lambda: "a" not in service.reported())
    assert {worker.config.model for worker in service.workers()} == {"b"}


async def test_a_load_with_a_worker_that_exits_fails_with_its_last_line_and_is_not_repeated(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "router.cli.serve.autoscale.MODULES", {"prefill": "failing_worker", "decode": "pretended_worker"}
    )
    service.want(WantedModel("a", 1, PAIR))
    await until(lambda: "a" in service.reported() and service.reported()["a"].failure)
    why = "prefill-0 exited while it loaded (exit status 1): the file is damaged"
    assert service.reported()["a"] == ModelReport("a", 1, failure=why)
    assert not service.workers(), "the other worker has been stopped"
    await asyncio.sleep(0.5)
    assert not service.workers()
    monkeypatch.setattr("router.cli.serve.autoscale.MODULES", dict.fromkeys(PAIR, "pretended_worker"))
    service.want(WantedModel("a", 2, PAIR))
    assert (await service.ready("a")).load == 2


def test_the_address_file_is_read_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerChild("pretended_worker", DecodeWorkerConfig(worker_id="decode-0"), tmp_path)
    assert (worker.read_address(), worker.http_address()) == ("", None)
    worker.address_file.write_text('{"address":')
    assert (worker.read_address(), worker.http_address()) == ("", None)
    worker.address_file.write_text('{"address": "tcp://h:1", "http": "http://[::1]:2"}')
    assert worker.read_address() == "tcp://h:1"
    monkeypatch.delattr(Path, "read_text")
    assert (worker.read_address(), worker.http_address()) == ("tcp://h:1", ("::1", 2))


def test_errors_are_copied_and_the_last_one_is_kept_whatever_becomes_of_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            assert len(data) <= MAX_PART_BYTES
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=Full()))
    theirs, ours = os.pipe()
    line = LastLine(os.fdopen(theirs, "rb"))
    with os.fdopen(ours, "wb") as worker:
        worker.write(b"a line\n" + b"the last" + b"!" * 200_000 + b"\n\n")
    line._thread.join(60)
    assert line.read().startswith("the last!!")


def test_a_plan_on_demand_has_no_workers(tmp_path: Path) -> None:
    plan = read_plan(["--models-dir", str(tmp_path), "--max-memory-gib=3", "--decode=2"], {}, num_cores=8)
    assert (plan.prefill, plan.decode, plan.models) == ((), (), ())
    assert plan.on_demand is not None
    assert (plan.on_demand.models_dir, plan.on_demand.budget, plan.on_demand.keep_s) == (
        str(tmp_path),
        3 * BYTES_PER_GIB,
        300.0,
    )
    roles = plan.on_demand.roles(generates=True, has_prefill=True)
    assert roles == {"prefill": 1, "decode": 2}
    assert plan.on_demand.roles(generates=False, has_prefill=True) == {"prefill": 1, "decode": 0}
    each = 4 * 10**9 + BYTES_PER_GIB + BYTES_PER_GIB // 4  # perhaps float32, KV, rest
    assert plan.on_demand.num_bytes(MODEL, roles) == 3 * each
    shared = {"DIPTYCH_MODELS_DIR": str(tmp_path)}
    assert read_plan(["a", "--config", ""], shared, num_cores=8).models == ("a",)
    (tmp_path / "m.toml").write_text('[[model]]\nname = "a"\nmodel = "a"\n')
    assert read_plan(["--models-file", str(tmp_path / "m.toml")], shared, num_cores=8).models == ("a",)


def test_a_worker_that_takes_all_of_a_gpu_takes_the_budget() -> None:
    plan = read_plan(["--on-demand", "--device=cuda", "--max-memory-gib=3"], {}, num_cores=8, num_gpus=1)
    assert plan.on_demand is not None
    assert plan.on_demand.num_bytes(MODEL, PAIR) == plan.on_demand.budget
    assert plan.kinds["decode"].gpu_memory_utilization == pytest.approx(0.45), "both workers share the GPU"
    counted = WorkerMemory(kv_tokens=100, rest=5)
    assert counted.bytes_of(MODEL) == 4 * 100 * 1000 + 5


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        ("tiny-random --on-demand", "on_demand"),
        ("tiny-random --models-dir .", "models_dir"),
        ("--models-dir /does/not/exist", "models_dir"),
        ("--models-dir . --models-file m.toml", "models_dir"),
        ("--models-dir . --models-file m.toml --on-demand", "models_dir"),
        ("--on-demand --autoscale", "autoscale"),
        ("--on-demand --router-processes 2", "router_processes"),
        ("--on-demand --served-model-name a", "served_model_name"),
        ("--on-demand --device cuda --kv-memory-gib 1", "max_memory_gib"),
    ],
)
def test_a_plan_that_excludes_load_on_demand_is_refused(argv: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_plan(argv.split(), {}, num_cores=8, num_gpus=1)
    assert refused.value.field == field
