"""Whole simulations: against a formula, under deaths, with one seed twice, by policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.simulator.report import Findings
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.workers.prefill import FixedPrefillScheduler
from benchmarks.simulator.world.scenario import Scenario
from common.engine.kv.block_pool import BlockPool
from common.latency import StepModel
from common.wire.messages import WorkerHeartbeat
from prefill_worker.scheduler import PrefillScheduler
from router.policy import POLICIES

from ...prefill_worker.test_scheduler import prompt


def simulate(scenario: Scenario) -> Run:
    return Simulation(scenario).run()


def test_one_worker_is_a_queue_of_one_server(scenario: Callable[..., Scenario]) -> None:
    """M/D/1: each wait as Lindley's recursion has it, their mean as Pollaczek and Khinchine's formula."""
    service_s, rate = 0.05, 12.0
    run = simulate(
        scenario(
            prefill={"count": 1, "coefficients": {"token_s": service_s / 512}, "max_step_tokens": 512},
            decode={"count": 1},
            load={"rate": rate, "input_len": "512", "output_len": "1"},
            settings={"max_wait_s": 3600.0, "queue_timeout_s": 3600.0},
            duration_s=100.0,
            noise=0.0,
            message_s=0.0,
            seed=3,
        )
    )
    waits, wait, before = [], 0.0, -math.inf
    for request in run.requests:
        wait = max(0.0, wait + service_s - (request.arrival_s - before))
        before = request.arrival_s
        waits.append(wait)
    assert [request.ttft_s - service_s for request in run.requests] == pytest.approx(waits, abs=1e-9)
    used = rate * service_s
    assert sum(waits) / len(waits) == pytest.approx(used * service_s / (2 * (1 - used)), rel=0.15)
    assert run.num_choices == {"prefill": len(waits)}


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_when_workers_die(scenario: Callable[..., Scenario], seed: int) -> None:
    """`Simulation.run` checks the books: requests, tokens, blocks, bookings and bytes."""
    worker = ("prefill-0", "decode-1", "decode-0")[seed]
    run = simulate(
        scenario(
            prefill={"start_s": 1.0, "link_rate": 2e8},
            decode={"start_s": 1.0, "num_blocks": 600},
            load={"rate": 12.0},
            routers=2,
            seed=seed,
            settings={"max_retries": 100},
            event=[
                {"at_s": 3.0, "kind": "death", "worker": "prefill-1", "back_s": 1.0},
                {"at_s": 4.0, "kind": "silence", "worker": worker, "back_s": 3.0},
                {"at_s": 5.0, "kind": "death", "worker": "decode-1"},
                {"at_s": 5.5, "kind": "start", "worker": "decode"},
            ],
        )
    )
    found = Findings.of(run)
    assert found.num_ok + found.num_refused + found.num_failed == found.num_requests > 90
    assert found.num_ok > 50
    assert sum(run.num_retries.values()) > 0
    assert run.conserved.num_bytes > 0
    assert run.conserved.num_answer_tokens >= sum(r.output_len for r in run.requests if r.outcome == "ok")


def outcomes(run: Run) -> list[tuple[str, float, float]]:
    return [(request.outcome, request.first_token_at, request.ended_at) for request in run.requests]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result(scenario: Callable[..., Scenario]) -> None:
    first, second = (simulate(scenario(policy="random", seed=5)) for _ in range(2))
    assert outcomes(first) == outcomes(second)
    assert (first.num_events, first.worker_seconds) == (second.num_events, second.worker_seconds)
    assert outcomes(simulate(scenario(policy="random", seed=6))) != outcomes(first)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"diptych"}))
def test_each_policy_serves_all(scenario: Callable[..., Scenario], policy: str) -> None:
    found = Findings.of(simulate(scenario(policy=policy, duration_s=3.0)))
    assert found.num_ok == found.num_requests > 5


def test_one_pool_serves_alone(scenario: Callable[..., Scenario]) -> None:
    run = simulate(scenario(prefill={"count": 0}, duration_s=4.0))
    assert {request.outcome for request in run.requests} == {"ok"}
    assert set(run.num_choices) == {"local"}
    assert run.conserved.num_bytes == 0.0


def test_turns_are_taken_and_shared_prefixes_are_followed(scenario: Callable[..., Scenario]) -> None:
    """The first prompts come before anything is cached; after that one worker of each pool has the prefix."""
    load = {"shared_prefix_len": 512, "input_len": "600", "output_len": "2"}
    shares = {}
    for policy in ("round-robin", "prefix-only"):
        simulation = Simulation(scenario(policy=policy, load=load))
        simulation.run()
        steps = [simulation.workers[f"prefill-{number}"].num_steps for number in range(2)]
        shares[policy] = min(steps) / sum(steps)
    assert shares["round-robin"] > 0.4
    assert shares["prefix-only"] < 0.1


@pytest.mark.slow
def test_a_slow_worker_gets_less(scenario: Callable[..., Scenario]) -> None:
    """Its heartbeats say that its steps take longer."""
    event = [{"at_s": 0.0, "kind": "slow", "worker": "prefill-0", "factor": 4.0}]
    simulation = Simulation(scenario(event=event, load={"rate": 15.0, "input_len": "1000"}))
    simulation.run()
    slow, fast = (simulation.workers[f"prefill-{number}"].num_prompt_tokens for number in range(2))
    assert 0 < slow < fast / 2


def test_a_worker_that_starts_serves_once_it_is_ready(scenario: Callable[..., Scenario]) -> None:
    event = [{"at_s": 2.0, "kind": "start", "worker": "decode"}]
    simulation = Simulation(scenario(event=event, decode={"start_s": 3.0}))
    run = simulation.run()
    assert simulation.workers["decode-2"].num_output_tokens > 0
    assert run.worker_seconds == pytest.approx(5 * run.seconds - 2.0)


def test_a_worker_that_stops_ends_its_streams_first(scenario: Callable[..., Scenario]) -> None:
    event = [{"at_s": 4.0, "kind": "stop", "worker": name} for name in ("decode-0", "prefill-0")]
    simulation = Simulation(scenario(event=event, load={"output_len": "100-200"}))
    run = simulation.run()
    found = Findings.of(run)
    assert found.num_ok == found.num_requests
    up_s = {name: process.up_s for name, process in simulation.processes.items()}
    assert 4.5 < up_s["prefill-0"] < 6.0 and 4.5 < up_s["decode-0"] < 8.0
    assert up_s["decode-1"] > run.seconds


def test_routers_miss_an_idle_worker_that_falls_silent(scenario: Callable[..., Scenario]) -> None:
    """It had nothing to say for seconds: what they have not heard since then, they must notice."""
    event = [{"at_s": at_s, "kind": "silence", "worker": f"decode-{n}"} for n, at_s in enumerate((5.0, 5.0002))]
    made = scenario(event=event, decode={"count": 3}, load={"rates": [[0.0, 1.0], [3.0, 0.0], [9.0, 3.0]]}, routers=2)
    simulation = Simulation(made)
    found = Findings.of(simulation.run())
    assert found.num_ok == found.num_requests
    for router in simulation.routers:
        states = {address: str(worker.state) for address, worker in router.registry.workers.items()}
        assert states["tcp://decode-0:7001"] == states["tcp://decode-1:7001"] == "dead"
        assert states["tcp://decode-2:7001"] == states["tcp://prefill-0:7001"] == "ready"


def test_models_can_be_fitted_as_in_life(scenario: Callable[..., Scenario]) -> None:
    simulation = Simulation(scenario(fit=True))
    found = Findings.of(simulation.run())
    assert found.num_ok == found.num_requests
    model = simulation.workers["prefill-0"].model
    assert model.knows_prompts
    assert 0.0 < model.error < 0.3


@pytest.mark.slow
def test_a_goal_bounds_waiting(scenario: Callable[..., Scenario]) -> None:
    """Ten times what the workers can do: those that are served meet the goal, the others hear so at once."""
    load = {"rate": 300.0, "input_len": "1500"}
    refuse = {"slo_refuse": "predicted"}
    made = scenario(load=load, goals={"ttft_ms": 500.0}, settings=refuse, duration_s=3.0, warm=True)
    found = Findings.of(simulate(made))
    assert found.num_refused > found.num_ok > 20
    assert found.ttft_ms.p90 < 500.0


@pytest.mark.parametrize(("goal_ms", "reason", "most"), ((40.0, "goal", 9), (0.0, "bound", 64)))
def test_a_goal_for_tokens_turns_the_knobs_of_decode_workers(
    scenario: Callable[..., Scenario], goal_ms: float, reason: str, most: int
) -> None:
    """Steps of 10 ms and 4 for each row: half to nine tenths of 40 ms hold four to six rows, and patience adds some."""
    decode = {"count": 1, "coefficients": {"fixed_s": 0.01, "row_s": 0.004, "token_s": 1e-4}, "slo_tpot_ms": goal_ms}
    made = scenario(decode=decode, load={"rate": 4.0, "output_len": "60"}, warm=True, duration_s=8.0)
    simulation = Simulation(made)
    heard = list[tuple[str, WorkerHeartbeat]]()
    for router in simulation.routers:
        router.hear_beats = lambda beats, hear=router.hear_beats: (heard.extend(beats), hear(beats))
    simulation.run()
    beats = [beat for address, beat in heard if "decode" in address and beat.num_running]
    caps = {beat.batch_cap for beat in beats}
    assert simulation.workers["decode-0"].scheduler.batch_cap.reason == reason
    assert 4 <= min(caps) <= max(caps) <= most
    assert max(beat.num_running for beat in beats) > 4


def test_a_worker_with_nothing_to_do_ends_once_it_is_told_to(scenario: Callable[..., Scenario]) -> None:
    """Its routers call it quiet all the while: a beat looks at it all the same."""
    made = scenario(
        prefill={"count": 3}, load={"rate": 0.5}, event=[{"at_s": 3.0, "kind": "stop", "worker": "prefill-2"}]
    )
    simulation = Simulation(made)
    run = simulation.run()
    assert 3.0 < simulation.processes["prefill-2"].up_s < 5.0 < run.seconds


def test_steps_of_a_fixed_pool_stay_at_their_largest_size() -> None:
    """Production's are smaller while prompts have goals."""
    model, sizes = StepModel(fixed_s=1e-2, token_s=1e-3, num_steps=16), list[int]()
    for kind in (PrefillScheduler, FixedPrefillScheduler):
        plan = kind(BlockPool(512, 4), max_num_batched_tokens=512, max_num_seqs=4)
        plan.add(prompt("a", list(range(1000)), ttft_s=3.0))
        sizes.append(sum(chunk.num_tokens for chunk in plan.schedule(0.0, model).chunks))
    assert sizes[0] < sizes[1] == 512
