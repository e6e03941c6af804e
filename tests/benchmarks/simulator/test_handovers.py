"""Streams that go from one decode worker to another in virtual time: production decides, links are simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.world.scenario import Scenario
from decode_worker.handover import Handovers

SLOW = {"link_rate": 4e8, "start_s": 0.5}  # a token's KV crosses in a third of a millisecond
LONG = {"rate": 8.0, "output_len": "100-250"}
STOP = {"at_s": 4.0, "kind": "stop", "worker": "decode-0"}


def ended(simulation: Simulation, worker: str) -> float:
    return simulation.processes[worker].up_s


def all_ok(run: Run) -> bool:
    return {request.outcome for request in run.requests} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_streams_leave_a_worker_that_stops(scenario: Callable[..., Scenario], seed: int) -> None:
    """No token is sampled twice, none is lost, and the worker ends long before its streams do.

    But a request that comes to the worker as it stops is placed again, and its first token sampled once more.
    """
    simulation = Simulation(scenario(event=[STOP], load=LONG, seed=seed))
    run = simulation.run()
    assert all_ok(run)
    assert run.num_handovers["done"] > 2
    assert not run.num_retries
    num_again = sum(sum(one.core.counters.num_choices.values()) for one in simulation.routers) - len(run.requests)
    assert 0 <= run.conserved.num_computed_tokens - run.conserved.num_answer_tokens <= num_again <= 1
    assert ended(simulation, "decode-0") < 5.0


def test_its_bytes_are_the_blocks_that_it_had(scenario: Callable[..., Scenario]) -> None:
    """One stream of 100 tokens and steps of 10 ms: it pauses for what has filled since, and the last, partial block."""
    made = scenario(
        prefill={"count": 0},
        decode={"coefficients": {"fixed_s": 0.01}, "link_rate": 1e9},
        load={"rate": 1.0, "input_len": "100", "output_len": "300"},
        duration_s=1.5, noise=0.0, message_s=0.001, link_s=0.0, seed=2,
        event=[{"at_s": 2.0, "kind": "stop", "worker": "decode-1"}],
    )  # fmt: skip
    simulation = Simulation(made)
    paused = list[int]()
    (request,) = simulation.requests[:1]

    def watch() -> None:
        for worker in simulation.workers.values():
            if (sequence := worker.scheduler.find(request.request_id)) is not None and worker.scheduler.num_leaving:
                paused.append(sequence.num_computed)
        simulation.world.clock.after(0.0005, watch)

    watch()
    run = simulation.run()
    block_bytes = 16 * 131_072
    source = simulation.processes["decode-1"]
    assert run.num_handovers == {"done": 1}
    assert source.outbound.num_bytes == pytest.approx(-(-paused[0] // 16) * block_bytes)
    assert len(set(paused)) == 1
    token_s = (request.ended_at - request.first_token_at) / 299
    assert 0.01 < token_s < 0.01 + (block_bytes / 1e9 + 0.02) / 299


@pytest.mark.slow
@pytest.mark.parametrize("worker", ("decode-0", "decode-1"))
@pytest.mark.parametrize("kind", ("death", "silence"))
def test_either_side_may_die_meanwhile(scenario: Callable[..., Scenario], worker: str, kind: str) -> None:
    """If the target dies, streams go on where they were; if the source does, elsewhere."""
    event = [STOP, {"at_s": 4.1, "kind": kind, "worker": worker, "back_s": 0.5}]
    simulation = Simulation(scenario(event=event, load=LONG, decode=SLOW, prefill=SLOW, settings={"max_retries": 9}))
    run = simulation.run()
    assert all_ok(run)
    assert run.num_handovers["failed"] + run.num_handovers["ended"] > 0
    assert run.num_retries["decode"] > 0
    assert run.conserved.num_bytes_dropped > 0


def test_a_hand_over_whose_target_says_nothing_ends(
    scenario: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused sequence goes on after MAX_PAUSE_S, though nothing else happens on its worker."""
    resumed = list[str]()
    expire = Handovers.expire

    def counted(self: Handovers, now: float) -> None:
        before = len(self)
        expire(self, now)
        resumed.extend("expired" for _ in range(before - len(self)))

    monkeypatch.setattr(Handovers, "expire", counted)
    event = [STOP, {"at_s": 4.06, "kind": "silence", "worker": "decode-1", "back_s": 1.0}]
    load = {"rates": [[0.0, 8.0], [3.8, 0.0]], "output_len": "200", "input_len": "300"}
    run = Simulation(
        scenario(event=event, load=load, decode={"start_s": 0.5}, settings={"worker_timeout_s": 8.0})
    ).run()
    assert resumed
    assert {request.outcome for request in run.requests} == {"ok"}


def crowded(scenario: Callable[..., Scenario], **values: Any) -> Scenario:
    """Answers that outgrow the blocks of a worker which got too many of them."""
    load = {"rate": 6.0, "input_len": "100-500", "output_len": "100-1200"}
    return scenario(
        **({"decode": {"num_blocks": 500}, "load": load, "policy": "random", "seed": 1, "duration_s": 7.0} | values)
    )


def test_streams_move_where_blocks_are_left(scenario: Callable[..., Scenario]) -> None:
    with_moves, without = (Simulation(crowded(scenario, settings={"balance_decode": is_on})) for is_on in (True, False))
    run, plain = with_moves.run(), without.run()
    assert run.num_handovers["done"] > 0 and not plain.num_handovers
    assert with_moves.routers[0].core.counters.num_balanced["blocks"] >= run.num_handovers["done"]
    assert run.conserved.num_answer_tokens == run.conserved.num_computed_tokens
    assert run.conserved.num_bytes > plain.conserved.num_bytes


@pytest.mark.slow
def test_the_same_seed_moves_the_same_streams(scenario: Callable[..., Scenario]) -> None:
    first, second = (Simulation(crowded(scenario, event=[STOP], routers=2)).run() for _ in range(2))
    ends = [[(one.outcome, one.first_token_at, one.ended_at) for one in run.requests] for run in (first, second)]
    assert ends[0] == ends[1]
    assert first.num_handovers == second.num_handovers and first.num_handovers["done"] > 0


@pytest.mark.slow
def test_steps_at_once_move_streams_as_single_steps_do(scenario: Callable[..., Scenario]) -> None:
    made = scenario(event=[STOP], load=LONG, noise=0.0, duration_s=6.0)
    ends = []
    for most_steps in (None, 1):
        run = Simulation(made, most_steps=most_steps).run()
        assert run.num_handovers["done"] > 2
        ends.append([request.ended_at for request in run.requests])
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
