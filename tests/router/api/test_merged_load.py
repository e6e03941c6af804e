from __future__ import annotations

from typing import Any

import orjson
import pytest

from common.observe.averages import RecentQuantile
from router.api.load import merged_load, own_load
from router.observe.recent_traffic import KINDS, SHARES


async def test_one_process_alone_is_all(running: Any) -> None:
    router_state = running.app.state.router_state
    own = orjson.loads(orjson.dumps(own_load(router_state)))
    assert orjson.loads(orjson.dumps(merged_load([own["load"]], [own["counts"]]))) == own["load"]


async def test_two_processes(running: Any) -> None:
    await running.completion(max_tokens=8)
    own = orjson.loads(orjson.dumps(own_load(running.app.state.router_state)))
    other = orjson.loads(orjson.dumps(own))
    other["load"]["classes"][0] |= {"attainment": {"ttft": 0.5}, "oldest_wait_s": 9.0}
    own["load"]["classes"][0] |= {"attainment": {"ttft": 1.0}}
    other["load"]["traffic"]["ttft"]["num"] = 3
    other["load"]["workers"][0] |= {"num_booked_requests": 5, "num_available_blocks": 1}
    both = merged_load([own["load"], other["load"]], [own["counts"], other["counts"]])
    assert both["stages"] == {"queue": 0, "decode": 4} and both["server_load"] == 4
    (batch,) = both["classes"]
    assert (batch["num_waiting"], batch["num_held"], batch["num_refused"], batch["oldest_wait_s"]) == (6, 4, 14, 9.0)
    assert batch["attainment"] == {"ttft": pytest.approx((1.0 + 3 * 0.5) / 4)}
    (worker,) = both["workers"]
    assert (worker["num_booked_requests"], worker["num_available_blocks"]) == (5, 90)
    assert both["traffic"]["ttft"].num == 2 and both["traffic"]["itl"].num == 14
    (model,), (one,) = both["models"], own["load"]["models"]
    assert {**model, "classes": []} == {**one, "classes": [], "num_in_flight": 2 * one["num_in_flight"]}
    assert model["classes"][0]["num_waiting"] == 6


def test_percentiles_are_those_of_all_observations() -> None:
    times = [RecentQuantile(), RecentQuantile()]
    for value in range(1, 101):
        times[value % 3 == 0].observe(value / 100, 0.0)
    together = RecentQuantile()
    for value in range(1, 101):
        together.observe(value / 100, 0.0)
    load: dict[str, Any] = {
        **{"server_load": 0, "stages": {}, "classes": [], "workers": [], "models": [], "warnings": []},
        "traffic": {"rates": {"requests_per_s": 1.5}, "ttft": {"num": 1}},
    }
    counts = [{kind: one.counts(0.0) for kind in KINDS} for one in times]
    merged = merged_load([load, load], counts)["traffic"]
    _, expected = together.quantiles(SHARES, 0.0)
    found = merged["ttft"]
    assert [found.p50_ms, found.p90_ms, found.p99_ms] == [value * 1e3 for value in expected] and found.num == 100
    assert merged["rates"] == {"requests_per_s": 3.0}
