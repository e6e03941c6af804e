"""Many steps at once are what single steps are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pytest

from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workers.coalesced import CoalescedGaps, CoalescedScheduler, StepRun
from benchmarks.simulator.world.scenario import Scenario
from benchmarks.simulator.world.tokens import Content, CountedTokens, InjectedHasher
from common.engine.kv.block_pool import BlockPool
from common.engine.sequences.step_budget import TokenGoal
from common.latency.step_model import StepModel
from common.wire.messages import DecodeRequest
from common.wire.sampling_params import SamplingParams
from decode_worker.sequence import DecodeSequence, RequestStatus


def scheduler(num_blocks: int, lengths: tuple[int, ...]) -> CoalescedScheduler:
    """Sequences of these lengths that decode: their prompts are computed."""
    made = CoalescedScheduler(BlockPool(num_blocks, 4), max_num_seqs=8, local_prefill_chunk=1000, watermark=0.0)
    for number, length in enumerate(lengths):
        request = DecodeRequest(request_id=str(number), attempt=0, prompt=b"", params=SamplingParams(max_tokens=99))
        hasher = InjectedHasher(Content(number, length), 4)
        made.add(DecodeSequence(b"r", request, CountedTokens(length), hasher, 0.0, 99.0, status=RequestStatus.WAITING))
    for chunk in made.schedule(0.0, StepModel()).chunks:
        made.advance(chunk)
        chunk.sequence.token_ids.append(0)
    return made


def step(made: CoalescedScheduler) -> None:
    for chunk in made.schedule(0.0, StepModel()).chunks:
        made.advance(chunk)
        chunk.sequence.token_ids.append(0)


def state(made: CoalescedScheduler) -> object:
    sequences = [(s.num_computed, len(s.token_ids), len(s.blocks), s.num_published) for s in made.running]
    return sequences, made.pool.counts, made.check_integrity()


@pytest.mark.parametrize("num_steps", (1, 3, 4, 17))
def test_steps_at_once_leave_what_single_steps_leave(num_steps: int) -> None:
    one_by_one, at_once = scheduler(64, (5, 8, 11)), scheduler(64, (5, 8, 11))
    for _ in range(num_steps):
        step(one_by_one)
    at_once.schedule(0.0, StepModel())
    at_once.advance_steps(num_steps)
    assert state(at_once) == state(one_by_one)


def test_room_ends_where_a_step_would_preempt() -> None:
    made = scheduler(12, (5, 8, 11))
    made.schedule(0.0, StepModel())
    most = made.num_steps_with_room(100)
    single = scheduler(12, (5, 8, 11))
    num_steps = 0
    while not single.schedule(0.0, StepModel()).preempted:
        for sequence in list(single.running):
            sequence.num_computed += 1
            sequence.token_ids.append(0)
        num_steps += 1
    assert most == num_steps > 1


def test_the_time_of_steps_is_the_sum_of_their_times() -> None:
    run = StepRun(10.0, 50, first_s=0.01, growth_s=0.002)
    times = [0.01 + 0.002 * number for number in range(50)]
    ends = [sum(times[: count + 1]) for count in range(50)]
    assert run.seconds(50) == pytest.approx(ends[-1])
    for count, end in enumerate(ends[:-1], 1):
        assert run.num_ended(10.0 + end - 1e-6) == count - 1
        assert run.num_ended(10.0 + end + 1e-6) == run.num_begun(10.0 + end - 1e-6) == count
    assert run.num_begun(10.0) == 1 and run.num_ended(99.0) == 50


def ends(scenario: Scenario, most_steps: int | None) -> list[tuple[str, float, float]]:
    run = Simulation(scenario, most_steps=most_steps).run()
    return [(request.outcome, request.first_token_at, request.ended_at) for request in run.requests]


def test_what_joins_waits_for_a_step_that_was_launched_ahead(scenario: Callable[..., Scenario]) -> None:
    """Every answer but the first begins while others are decoded, in steps of 10 ms whatever is in them."""
    ended_at = []
    for ahead in (False, True):
        made = scenario(
            prefill={"count": 1, "coefficients": {"token_s": 1e-4}},
            decode={"count": 1, "coefficients": {"fixed_s": 0.01}, "ahead": ahead},
            load={"rate": 12.0, "input_len": "103", "output_len": "60"}, duration_s=0.4, noise=0.0, seed=2,
        )  # fmt: skip
        ended_at.append([request.ended_at for request in Simulation(made).run().requests])
    later_s = [late - early for early, late in zip(*ended_at, strict=True)]
    assert later_s == pytest.approx([0.0, *[0.01] * (len(later_s) - 1)], abs=1e-9)
    assert len(later_s) > 2


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", (4096, 120))
def test_a_simulation_takes_steps_at_once_and_ends_alike(
    scenario: Callable[..., Scenario], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks, sequences are preempted as well."""
    one, preempted, preempt = {"count": 1}, [], CoalescedScheduler._preempt
    monkeypatch.setattr(CoalescedScheduler, "_preempt", lambda *args: (preempted.append(args[1]), preempt(*args)))
    made = scenario(
        prefill=one, decode=one | {"num_blocks": num_blocks}, noise=0.0, duration_s=5.0, load={"rate": 8.0},
        event=[{"at_s": 3.0, "kind": "death", "worker": "decode-0", "back_s": 0.1}],
    )  # fmt: skip
    made = msgspec.structs.replace(made, pool=tuple(msgspec.structs.replace(pool, start_s=0.2) for pool in made.pool))
    coalesced, single = ends(made, None), ends(made, 1)
    assert bool(preempted) == (num_blocks == 120)
    assert [outcome for outcome, *_ in coalesced] == [outcome for outcome, *_ in single]
    for (_, *times), (_, *expected) in zip(coalesced, single, strict=True):
        assert times == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_gaps_of_a_run_are_those_of_its_steps() -> None:
    run, sequences = StepRun(1.0, 7, 0.02, 0.003), list(scheduler(64, (5, 9)).running)
    observed: dict[str, list[tuple[float, float]]] = {"run": [], "steps": []}

    def gaps(name: str) -> CoalescedGaps:
        goal = TokenGoal(0.05)

        def observe_all(gaps_s: Iterable[float], predicted_s: float) -> None:
            observed[name].extend((gap_s, predicted_s) for gap_s in gaps_s)

        goal.observe_all = observe_all  # type: ignore[method-assign]
        return CoalescedGaps(goal)

    whole, single = gaps("run"), gaps("steps")
    for made in (whole, single):
        made.stepped(sequences[:1], 0.9, predicted_s=0.02, tokens_each=1.0)
    whole.ran(sequences, run, 7, 0.02)
    for number in range(1, 8):
        single.stepped(sequences, run.began_at + run.seconds(number), predicted_s=0.02, tokens_each=1.0)
    for made in (whole, single):
        made.stepped(sequences, 2.0, predicted_s=0.02, tokens_each=1.0)
    assert len(observed["run"]) == 8
    assert observed["run"] == observed["steps"]
