"""Workers of one machine that come and go: what is read, what is decided, and processes that only pretend to serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from router.local.autoscale import LocalScaler
from router.local.child import WorkerChild
from router.local.pools import Gauges, LocalPools
from router.local.processes import read_plan
from router.local.supervisor import Supervisor

from .test_serve import pretended, records, until  # noqa: F401 (records is a fixture)

PAGE = """# HELP diptych_pool_wanted_workers Workers that the plan wants
# TYPE diptych_pool_wanted_workers gauge
diptych_pool_wanted_workers{engine="router",role="prefill"} 0.0
diptych_pool_wanted_workers{engine="router",role="decode"} 3.0
diptych_worker_requests{engine="router",worker="decode-0",role="decode"} 7.0
other{role="decode"} 9.0
"""


def test_the_plan_is_read_from_the_gauges() -> None:
    assert Gauges.of(PAGE) == Gauges({"prefill": 0, "decode": 3}, {"decode-0": 7.0})
    assert Gauges.of("") == Gauges({}, {})
    for end in range(len(PAGE)):
        assert Gauges.of(PAGE[:end]).wanted.get("decode", 3) == 3, "half a page"


def test_autoscale_has_bounds() -> None:
    plan = read_plan(["--autoscale", "--slo-ttft-ms", "500"], {}, num_cores=8)
    assert plan.router.planner == "advice"
    assert (plan.router.max_prefill, plan.router.max_decode) == (4, 4)
    assert plan.decode[0].drain_timeout_s > 2 > read_plan([], {}, num_cores=8).decode[0].drain_timeout_s - 1
    given = read_plan(["--autoscale", "--decode=6", "--max-prefill=2"], {}, num_cores=8)
    assert (given.router.max_prefill, given.router.max_decode) == (2, 6)
    assert read_plan([], {}, num_cores=8).router.planner == "off"


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

    def start_worker(self, role: str) -> None:
        self.pools.add(role)  # type: ignore[arg-type]

    def end_worker(self, worker: WorkerChild) -> None:
        self.pools.leaving.add(worker)
        self.ended.append(worker.name)


async def test_the_least_busy_leave_and_names_are_used_again(tmp_path: Path) -> None:
    pools = LocalPools(read_plan(["--autoscale"], {}, num_cores=4).kinds, tmp_path)
    staff = Staff(pools)
    scaler = LocalScaler(staff, pools)
    await scaler.scale({"decode": 3, "prefill": 1})
    assert [worker.name for worker in pools] == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    scaler.requests = {"decode-0": 5.0, "decode-1": 0.0, "decode-2": 2.0}
    await scaler.scale({"decode": 1, "prefill": 1})
    assert staff.ended == ["decode-1", "decode-2"]
    await scaler.scale({"decode": 2})
    assert [worker.name for worker in pools.staying("decode")] == ["decode-0", "decode-3"], "two still leave"
    for worker in list(pools.leaving):
        pools.remove(worker)
    await scaler.scale({"decode": 3})
    assert "decode-1" in [worker.name for worker in pools.staying("decode")]


async def test_workers_are_started_listed_and_ended(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("router.local.supervisor.LEAVE_S", 0.0)
    monkeypatch.setattr("router.local.autoscale.LOOK_S", 0.05)
    supervisor: Supervisor = pretended(records, "--autoscale")
    monkeypatch.setattr("router.local.pools.MODULES", {"prefill": "pretended_worker", "decode": "pretended_worker"})
    await supervisor.start()
    assert "--discovery=file" in (records / "router").read_text()
    running = asyncio.create_task(supervisor.run())

    def listed() -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads((records / "workers.json").read_text())
        return found

    assert (len(listed()["prefill"]), len(listed()["decode"])) == (1, 1)
    await asyncio.sleep(0)
    supervisor.start_worker("decode")
    await until(lambda: len(listed()["decode"]) == 2)
    first = supervisor.pools.workers["decode"][0]
    supervisor.end_worker(first)
    assert len(listed()["leaving"]) == 1
    await until(lambda: len(listed()["decode"]) == 1 and not listed()["leaving"])
    assert not first.alive and (records / "decode-0").read_text().count("\n") == 1, "it was not started again"
    supervisor.stop()
    await running
    assert not any(child.alive for child in supervisor.children)
