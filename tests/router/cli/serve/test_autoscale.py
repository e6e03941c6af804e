"""Workers of one machine that come and go: what is read, what is decided, and processes that only pretend to serve."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.wire.message_fields import Role
from router.cli.serve.autoscale import Gauges, LocalPools, LocalScaler, autoscale
from router.cli.serve.child import RouterChild, WorkerChild
from router.cli.serve.processes import read_plan
from router.cli.serve.supervisor import Supervisor

from .test_serve import models_file, pretended, records, until  # noqa: F401 (records is a fixture)

PAGE = """# HELP diptych_pool_wanted_workers Workers that the plan wants
# TYPE diptych_pool_wanted_workers gauge
diptych_pool_wanted_workers{engine="router",model_name="a",role="prefill"} 0.0
diptych_pool_wanted_workers{engine="router",model_name="a",role="decode"} 3.0
diptych_pool_wanted_workers{engine="router",model_name="org/b",role="decode"} 2.0
diptych_worker_requests{engine="router",worker="decode-0",role="decode"} 7.0
other{role="decode"} 9.0
"""


def test_the_plan_is_read_from_the_gauges() -> None:
    wanted = {("a", "prefill"): 0, ("a", "decode"): 3, ("org/b", "decode"): 2}
    assert Gauges.of(PAGE) == Gauges(wanted, {"decode-0": 7.0})
    assert Gauges.of("") == Gauges({}, {})
    for end in range(len(PAGE)):
        assert Gauges.of(PAGE[:end]).wanted.items() <= wanted.items(), "half a page"


def test_of_several_processes_of_a_router_the_largest_plan_counts() -> None:
    sample = 'diptych_pool_wanted_workers{{model_name="{}",process="{}",role="decode"}} {}\n'
    page = "".join(sample.format(*one) for one in (("a", 0, 1), ("a", 1, 4), ("b", 0, 3), ("b", 1, 2)))
    assert Gauges.of(page).wanted == {("a", "decode"): 4, ("b", "decode"): 3}


@pytest.mark.slow
def test_autoscale_has_bounds() -> None:
    plan = read_plan(["--autoscale", "--slo-ttft-ms", "500"], {}, num_cores=8)
    assert plan.router.planner == "advice"
    assert (plan.router.max_prefill, plan.router.max_decode) == (4, 4)
    assert plan.decode[0].drain_timeout_s > 2 > read_plan([], {}, num_cores=8).decode[0].drain_timeout_s - 1
    given = read_plan(["--autoscale", "--decode=6", "--max-prefill=2"], {}, num_cores=8)
    assert (given.router.max_prefill, given.router.max_decode) == (2, 6)
    assert read_plan([], {}, num_cores=8).router.planner == "off"


def test_of_several_models_each_has_the_same_bounds(tmp_path: Path) -> None:
    models = (models_file(tmp_path, "a", "b"),)
    plan = read_plan(["--autoscale", *models, "--prefill=2", "--max-decode=3"], {}, num_cores=8)
    assert (plan.autoscale, plan.router.planner, plan.models) == (True, "advice", ("a", "b"))
    assert (plan.router.max_prefill, plan.router.max_decode) == (4, 3)
    assert [(one.worker_id, one.model) for one in plan.prefill] == [
        ("prefill-0", "a"), ("prefill-1", "a"), ("prefill-2", "b"), ("prefill-3", "b"),
    ]  # fmt: skip
    assert [(one.worker_id, one.model) for one in plan.decode] == [("decode-0", "a"), ("decode-1", "b")]
    on_gpu = read_plan(["--autoscale", *models, "--device=cuda", "--gpu-memory-utilization=0.8"], {}, num_gpus=1)
    found = [*on_gpu.prefill, *on_gpu.decode, *on_gpu.kinds.values()]
    assert [one.gpu_memory_utilization for one in found] == pytest.approx([0.2] * 6), "all share one GPU"
    with pytest.raises(ConfigError, match="decode"):
        read_plan(["--autoscale", *models, "--decode=4", "--max-decode=3"], {}, num_cores=8)


@pytest.mark.parametrize(
    "argv", ["--prefill=3 --max-prefill=2", "--decode=1 --min-decode=2", "--min-decode=3 --max-decode=2"]
)
def test_a_start_outside_of_the_bounds_is_refused(argv: str) -> None:
    with pytest.raises(ConfigError):
        read_plan(["--autoscale", *argv.split()], {}, num_cores=8)


class Staff:
    """Starts and ends workers on paper."""

    def __init__(self, pools: LocalPools) -> None:
        self.pools, self.ended = pools, list[str]()

    def start_worker(self, role: Role, model: str) -> None:
        self.pools.add(role, model=model)

    def end_worker(self, worker: WorkerChild) -> None:
        self.pools.leaving.add(worker)
        self.ended.append(worker.name)


async def test_the_least_busy_leave_and_names_are_used_again(tmp_path: Path) -> None:
    pools = LocalPools(read_plan(["--autoscale"], {}, num_cores=4).kinds, tmp_path)
    staff = Staff(pools)
    scaler = LocalScaler(staff, pools, "tiny-random")
    await scaler.scale({"decode": 3, "prefill": 1})
    assert [worker.name for worker in pools] == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    scaler.requests = {"decode-0": 5.0, "decode-1": 0.0, "decode-2": 2.0}
    await scaler.scale({"decode": 1, "prefill": 1})
    assert staff.ended == ["decode-1", "decode-2"]
    await scaler.scale({"decode": 2})
    assert names(pools, "decode", "tiny-random") == ["decode-0", "decode-3"], "two still leave"
    for worker in list(pools.leaving):
        pools.remove(worker)
    await scaler.scale({"decode": 3})
    assert "decode-1" in names(pools, "decode", "tiny-random")


def names(pools: LocalPools, role: Role, model: str) -> list[str]:
    return [worker.name for worker in pools.staying(role, model)]


def test_workers_on_cpus_share_the_memory_of_weights(tmp_path: Path) -> None:
    plan = read_plan([], {}, num_cores=4, num_gpus=0)
    pools = LocalPools(plan.kinds, tmp_path)
    workers = [pools.add(role, model="a") for role in ("prefill", "decode", "decode")]
    other = pools.add("decode", model="b")
    (path,) = {worker.config.weight_share for worker in workers}
    assert "diptych-weights" in os.readlink(path) and os.stat(path).st_blocks == 0
    assert os.stat(path).st_ino != os.stat(other.config.weight_share).st_ino
    inode = os.stat(path).st_ino
    for worker in workers:
        assert os.stat(path).st_ino == inode
        pools.remove(worker)
    assert not os.path.exists(path), "the weights of a model without workers stay in memory"
    on_gpu = read_plan(["--device", "cuda"], {}, num_cores=4, num_gpus=1)
    assert LocalPools(on_gpu.kinds, tmp_path).add("decode", model="a").config.weight_share == ""


async def test_models_scale_apart_and_their_workers_share_no_name(tmp_path: Path) -> None:
    plan = read_plan(["--autoscale", models_file(tmp_path, "a", "org/b"), "--block-size", "64"], {}, num_cores=4)
    pools = LocalPools(plan.kinds, tmp_path)
    staff = Staff(pools)
    first, second = (LocalScaler(staff, pools, model) for model in plan.models)
    await first.scale({"prefill": 1, "decode": 2})
    await second.scale({"prefill": 1, "decode": 2})
    await first.scale({"decode": 3})
    assert names(pools, "prefill", "a") == ["prefill-0"] and names(pools, "prefill", "org/b") == ["prefill-1"]
    assert names(pools, "decode", "a") == ["decode-0", "decode-1", "decode-4"]
    assert names(pools, "decode", "org/b") == ["decode-2", "decode-3"]
    assert {worker.config.block_size for worker in pools} == {64} and len({worker.name for worker in pools}) == 7
    second.requests = {"decode-0": 0.0, "decode-1": 0.0, "decode-2": 3.0, "decode-3": 5.0, "decode-4": 0.0}
    await second.scale({"prefill": 0, "decode": 1})
    assert staff.ended == ["prefill-1", "decode-2"], "workers of the other model do less"
    assert names(pools, "decode", "a") == ["decode-0", "decode-1", "decode-4"]
    for worker in list(pools.leaving):
        pools.remove(worker)
    await first.scale({"decode": 4})
    assert names(pools, "decode", "a") == ["decode-0", "decode-1", "decode-4", "decode-2"], "the name was free"


async def test_the_plan_of_each_model_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where clients call a model by another name than its setting; without a plan a model stays as it is."""
    monkeypatch.setattr("router.cli.serve.autoscale.LOOK_S", 0.0)
    looks = [PAGE, "", PAGE.replace("3.0", "1.0")]

    async def page(host: str, port: int, *, tls: bool = False) -> str:
        if not looks:
            raise asyncio.CancelledError
        return looks.pop(0)

    monkeypatch.setattr("router.cli.serve.autoscale.metrics_page", page)
    models = {"a": "folder/of-a", "org/b": "org/b", "c": "org/c"}
    plan = read_plan(["--autoscale", models_file(tmp_path, *models.values())], {}, num_cores=4)
    pools = LocalPools(plan.kinds, tmp_path)
    staff = Staff(pools)
    unplanned = pools.add("decode", model="org/c")
    with pytest.raises(asyncio.CancelledError):
        await autoscale(staff, pools, RouterChild(plan.router), models)
    assert names(pools, "decode", "org/b") == ["decode-4", "decode-5"]
    assert names(pools, "decode", "org/c") == [unplanned.name]
    assert staff.ended == ["decode-1", "decode-2"] and names(pools, "decode", "folder/of-a") == ["decode-3"]
    assert pools.workers["prefill"] == []


@pytest.mark.slow
async def test_workers_are_started_listed_and_ended(
    records: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.cli.serve.supervisor.LEAVE_S", 0.0)
    monkeypatch.setattr("router.cli.serve.autoscale.LOOK_S", 0.05)
    supervisor: Supervisor = pretended(records, "--autoscale", models_file(tmp_path, "tiny-random", "another"))
    monkeypatch.setattr(
        "router.cli.serve.autoscale.MODULES", {"prefill": "pretended_worker", "decode": "pretended_worker"}
    )
    await supervisor.start()
    assert "--discovery=file" in (records / "router").read_text()
    running = asyncio.create_task(supervisor.run())

    def listed() -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads((records / "workers.json").read_text())
        return found

    assert (len(listed()["prefill"]), len(listed()["decode"])) == (2, 2)
    await asyncio.sleep(0)
    supervisor.start_worker("decode", "another")
    await until(lambda: len(listed()["decode"]) == 3)
    assert names(supervisor.pools, "decode", "another") == ["decode-1", "decode-2"]
    first = supervisor.pools.workers["decode"][0]
    supervisor.end_worker(first)
    assert len(listed()["leaving"]) == 1
    await until(lambda: len(listed()["decode"]) == 2 and not listed()["leaving"])
    assert not first.alive and (records / "decode-0").read_text().count("\n") == 1, "it was not started again"
    supervisor.stop()
    await running
    assert not any(child.alive for child in supervisor.children)


def test_a_full_disk_delays_the_list_of_workers_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools = LocalPools(read_plan(["--autoscale"], {}, num_cores=4).kinds, tmp_path)
    worker = pools.add("decode", model="tiny-random")
    worker.address_file.write_text(json.dumps({"address": "tcp://127.0.0.1:7001"}))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for _ in range(3):
            pools.publish()
    assert not pools.file.exists() and len(caplog.records) == 1
    pools.publish()
    assert json.loads(pools.file.read_text())["decode"] == ["tcp://127.0.0.1:7001"]
