"""Workers of two models on one list of addresses: each goes to the fleet of the model that it says it serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.dispatch.dispatcher import Dispatcher
from router.fleet.census import ModelCensus

NAMES = {"a": frozenset(("org/a", "/models/a")), "b": frozenset(("org/b",))}


class TwoFleets:
    """A census and the dispatchers of the models `a` and `b`."""

    def __init__(self, config: Any) -> None:
        self.of = {name: Dispatcher(config, models=known) for name, known in NAMES.items()}
        known = {own: name for name, names in NAMES.items() for own in names}
        self.census = ModelCensus(config, known, {name: one.fleet.reconcile for name, one in self.of.items()})
        for one in self.of.values():
            one.fleet.on_stranger = self.census.on_stranger
            one.fleet.registry.explain = self.census.explain
            one.fleet.num_unassigned = self.census.num_unassigned

    async def start(self) -> None:
        for one in self.of.values():
            await one.start()
        await self.census.start()

    async def close(self) -> None:
        await self.census.close()
        for one in self.of.values():
            await one.close()

    def ready(self, name: str) -> set[str]:
        workers = self.of[name].fleet.registry.workers.values()
        return {worker.address for worker in workers if worker.ready}

    @property
    def failure(self) -> str:
        return self.census.failure + "".join(one.fleet.failure for one in self.of.values())


@pytest.fixture
async def two(cluster: Any) -> AsyncIterator[Any]:
    """Starts them over the workers of the cluster."""
    made: list[TwoFleets] = []

    async def start(**settings: Any) -> TwoFleets:
        made.append(TwoFleets(cluster.config(**settings)))
        await made[-1].start()
        return made[-1]

    yield start
    for one in made:
        await one.close()
        assert not one.failure


async def test_each_worker_goes_to_its_model(cluster: Any, two: Any, tools: Any) -> None:
    ours = cluster.add("prefill", model="org/a"), cluster.add("decode", model="/models/a")
    others = cluster.add("decode", model="org/b"), cluster.add("decode", model="org/b")
    found = await two()
    await tools.until(lambda: [len(found.ready(name)) for name in "ab"] == [2, 2])
    assert found.ready("a") == {worker.address for worker in ours}
    assert found.ready("b") == {worker.address for worker in others}
    request = tools.request()
    tokens, _ = await tools.collect(found.of["a"], request)
    assert tokens == tools.expected(request.prompt_token_ids, 8)
    assert not others[0].jobs and not others[1].jobs
    await tools.until(lambda: not found.census._asked)  # it greets no worker that it knows


async def test_a_worker_that_comes_back_with_another_model_changes_fleets(cluster: Any, two: Any, tools: Any) -> None:
    stays, moves = cluster.add("decode", model="org/a"), cluster.add("decode", model="org/b")
    found = await two()
    await tools.until(lambda: found.ready("a") and found.ready("b"))
    moves.die()
    moves.hello["model"] = "org/a"
    await moves.restart()
    await tools.until(lambda: found.ready("a") == {stays.address, moves.address})
    await tools.until(lambda: not found.of["b"].fleet.registry.workers)
    assert found.of["b"].ready == (
        False, "no decode worker serves this model"
    )  # fmt: skip


async def test_a_worker_that_says_its_model_only_when_it_has_loaded(cluster: Any, two: Any, tools: Any) -> None:
    worker = cluster.add("decode", model="./a-folder", block_size=16, fingerprint="loading")
    found = await two()
    await tools.until(lambda: worker.address in found.census._said)
    assert found.of["a"].ready[1] == (
        f"no decode worker serves this model (worker {worker.worker_id}: serves ./a-folder)"
    )
    worker.hello["model"] = "org/a"
    await tools.until(lambda: found.ready("a"))


async def test_an_address_without_a_worker_is_asked_until_there_is_one(cluster: Any, two: Any, tools: Any) -> None:
    worker = cluster.add("decode", model="org/a")
    worker.die()
    found = await two()
    said = f"no decode worker serves this model (worker at {worker.address}: no hello received)"
    assert found.of["a"].ready == (False, said)
    await worker.restart()
    await tools.until(lambda: found.ready("a"))


@pytest.mark.slow
async def test_discovery_adds_and_withholds_workers_of_each_model(
    cluster: Any, two: Any, tools: Any, tmp_path: Path
) -> None:
    first, second = cluster.add("decode", model="org/a"), cluster.add("decode", model="org/b")
    file = tmp_path / "workers.json"
    file.write_text(json.dumps({"decode": [first.address]}))
    found = await two(discovery="file", discovery_file=str(file), prefill=(), decode=())
    await tools.until(lambda: found.ready("a"))
    assert not found.ready("b")
    listed = {"decode": [first.address, second.address], "leaving": [first.address]}
    file.write_text(json.dumps(listed))
    await tools.until(lambda: found.ready("b") and not found.ready("a"))
    (leaving,) = found.of["a"].fleet.registry.workers.values()
    assert leaving.withheld == "terminating"
    file.write_text(json.dumps({"decode": [second.address]}))
    await tools.until(lambda: not found.of["a"].fleet.registry.workers)
    assert found.ready("b") == {second.address}


async def test_a_new_router_waits_for_workers_that_may_serve_its_models(
    cluster: Any, two: Any, tools: Any, tmp_path: Path
) -> None:
    file = tmp_path / "workers.json"
    known = cluster.add("decode", model="org/a")
    file.write_text(json.dumps({"decode": [known.address, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]}))
    found = await two(prefill=(), decode=(), discovery="file", discovery_file=str(file))
    await tools.until(lambda: found.ready("a") == {known.address})
    is_ready, why = found.of["a"].ready
    assert not is_ready and why.startswith("1 of 3 decode workers have answered")
    file.write_text(json.dumps({"decode": [known.address]}))
    await tools.until(lambda: found.of["a"].ready[0])


async def test_a_model_at_zero_whose_fallback_answers_is_woken(cluster: Any, two: Any, tools: Any) -> None:
    cluster.add("decode", model="org/b")
    found = await two()
    await tools.until(lambda: found.ready("b"))
    assert [found.of[name].demand(0.0).held["decode"] for name in "ab"] == [0, 0]
    for one in found.of.values():
        one.passed_on()
    assert [found.of[name].demand(0.0).held["decode"] for name in "ab"] == [1, 0]  # b has a worker: it was full
    found.of["a"]._passed_on_at -= 61.0
    assert found.of["a"].demand(0.0).held["decode"] == 0


async def test_a_dead_pool_of_one_model_leaves_the_other_alone(cluster: Any, two: Any, tools: Any) -> None:
    ours, other = cluster.add("decode", model="org/a"), cluster.add("decode", model="org/b")
    found = await two()
    await tools.until(lambda: found.ready("a") and found.ready("b"))
    other.die()
    await tools.until(lambda: not found.ready("b"))
    request = tools.request(prompt=[1, 2, 3])
    assert (await tools.collect(found.of["a"], request))[0] == tools.expected([1, 2, 3], 8)
    assert found.ready("a") == {ours.address} and other.address in found.of["b"].fleet.registry.workers
