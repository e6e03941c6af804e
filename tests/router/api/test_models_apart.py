"""What a router of several models says of each, and how lines of batches for them pass each other."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.load import joined_load
from router.dispatch.load import ClassLoad, DispatchLoad

from ..sdk import client_of
from ..several import Start
from .batches.batching import ended, line, made

GOALS = ((500.0, 0.0), (200.0, 30.0), (0.0, 60.0))
NO_WORKER = (False, "no decode worker is ready (1 configured: decode-0 is silent)")


@pytest.mark.slow
async def test_lines_for_a_model_without_workers_let_those_for_others_pass(several: Start, tools: Any) -> None:
    """One of them waits for a worker, beside the places of all lines; the others follow when it is there."""
    both = await several(batch_concurrency=1, response_store="memory")
    both.large.is_ready, both.large.hold_after = NO_WORKER, 0
    models = [*("large", "fast") * 4, "chat"]
    lines = [line(f"{i}", model=model, prompt="hi", max_tokens=2) for i, model in enumerate(models)]
    async with client_of(both.running) as sdk:
        first = await made(sdk, lines)
        await tools.until(lambda: len(both.small.requests) == 4)
        second = await made(sdk, [line("a", model="large", prompt="hi"), line("b", model="small", prompt="hi")])
        await tools.until(lambda: len(both.small.requests) == 5)
        assert len(both.large.requests) == 1, "of nine lines that may be for it"
        counts = (await sdk.batches.retrieve(first.id)).request_counts
        assert counts is not None and (counts.completed, counts.total) == (4, 9)
        both.large.is_ready = (True, "")
        both.large.go.set()
        done = [await ended(sdk, batch) for batch in (first, second)]
    assert [batch.request_counts.completed for batch in done if batch.request_counts] == [9, 2]
    assert len(both.large.requests) + len(both.small.requests) == 11


async def test_load_shows_the_goals_of_each_model(several: Start) -> None:
    both = await several(large={"slo_ttft_ms": 900.0}, slo_ttft_ms=300.0, slo_tpot_ms=40.0)
    load = (await both.running.http.get("/load")).json()
    found = {one["id"]: (one["goals"], [goals["name"] for goals in one["classes"]]) for one in load["models"]}
    assert found == {
        "small": ({"ttft_ms": 300.0, "tpot_ms": 40.0}, ["batch"]),
        "large": ({"ttft_ms": 900.0, "tpot_ms": 40.0}, ["batch"]),
    }
    alone = (await both.running.http.get("/load?model=large")).json()
    assert [one["goals"]["ttft_ms"] for one in alone["models"]] == [900.0]


def test_a_class_of_several_models_has_the_tightest_of_their_goals() -> None:
    loads = [DispatchLoad({}, (), {}, {}, {}, 0, classes=(ClassLoad("a", ttft_ms=t, tpot_ms=p),)) for t, p in GOALS]
    (shown,) = joined_load(loads).classes
    assert (shown.ttft_ms, shown.tpot_ms) == (200.0, 30.0)
