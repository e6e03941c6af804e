"""What a prefill worker computes next while a step is in flight: by example, and under any interleaving."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from common.latency.step_model import StepModel
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler

from ..examples import examples
from .test_scheduler import MODEL, SIZE, SchedulerMachine, prompt, scheduler


class AheadMachine(SchedulerMachine):
    """Each step is planned before the one before has ended, and the device writes as late as it can."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[tuple[PrefillChunk, tuple[int, ...]]] = []

    @rule(fails=st.booleans(), is_known=st.booleans())
    def step(self, fails: bool, is_known: bool) -> None:
        """With `fails` the step in flight does, and the prompts of the next one fail with those of it."""
        had_work = self.plan.has_work
        output = self.plan.schedule(self.now, StepModel(fixed_s=0.1, token_s=0.2, num_steps=1) if is_known else MODEL)
        if bool(output.chunks) != had_work:
            assert had_work and self.in_flight, "only the end of a step in flight may be waited for"
        assert sum(chunk.num_tokens for chunk in output.chunks) <= self.BUDGET
        assert len(output.chunks) <= self.MAX_SEQS
        before, self.in_flight = self.in_flight, []
        for chunk in output.chunks:
            assert chunk.num_tokens > 0 and chunk.start == chunk.sequence.num_begun
            self.plan.launched(chunk)
            self.in_flight.append((chunk, tuple(chunk.sequence.blocks)))
        for chunk, table in before:
            for position in range(chunk.start, chunk.end):
                cell = (table[position // SIZE], position % SIZE)
                self.cells[cell] = tuple(chunk.sequence.token_ids[: position + 1])
            if self.plan.ended(chunk) and not fails:
                self.plan.advance(chunk, 0.0)
        if fails:
            for chunk, _ in (*before, *self.in_flight):
                self.plan.remove(chunk.sequence)

    @invariant()
    def every_block_has_its_owner(self) -> None:
        self.plan.check_integrity()
        assert sum(sequence.num_remaining > 0 for sequence in self.plan.running) <= self.MAX_SEQS

    def teardown(self) -> None:
        self.step(fails=False, is_known=True)
        while self.in_flight or self.plan.has_work or self.plan.held:
            for sequence in list(self.plan.held.values()):
                self.plan.remove(sequence)
            self.step(fails=False, is_known=True)
        assert len(self.plan) == 0
        assert self.plan.check_integrity().owned == 0 and not self.plan._owned.total()


TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(derandomize=True, deadline=None, max_examples=examples(60), stateful_step_count=50)


class WindowedAheadMachine(AheadMachine):
    WINDOW, LONGER = 5, 4


TestWindowedAheadMachine = pytest.mark.slow(WindowedAheadMachine.TestCase)
TestWindowedAheadMachine.settings = TestAheadMachine.settings


def launch(plan: PrefillScheduler) -> list[PrefillChunk]:
    """A step that stays in flight."""
    chunks = list(plan.schedule(1.0, MODEL).chunks)
    for chunk in chunks:
        plan.launched(chunk)
    return chunks


def end(plan: PrefillScheduler, chunks: list[PrefillChunk]) -> None:
    for chunk in chunks:
        if plan.ended(chunk):
            plan.advance(chunk, 2.0)


def test_a_step_is_planned_behind_the_one_in_flight() -> None:
    plan, long = scheduler(budget=8), prompt("a", list(range(20)))
    plan.add(long)
    first = launch(plan)
    second = launch(plan)
    assert [(chunk.start, chunk.end) for chunk in (*first, *second)] == [(0, 8), (8, 16)]
    assert long.num_computed == 0 and plan.num_waiting_tokens == 20, "neither is computed yet"
    end(plan, first)
    assert long.num_published == 2 and plan.num_waiting_tokens == 12
    end(plan, second)
    end(plan, launch(plan))
    assert long.computed and not plan.has_work


def test_what_a_step_in_flight_computes_for_another_prompt_is_shared_afterwards() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("a", list(range(8))))
    first = launch(plan)
    plan.add(prompt("b", list(range(8))))
    plan.add(prompt("c", [9] * 8, at=1.0))
    assert [chunk.sequence.request_id for chunk in launch(plan)] == ["c"], "others pass it meanwhile"
    end(plan, first)
    assert [(chunk.sequence.request_id, chunk.start) for chunk in launch(plan)] == [("b", 4)]


def test_without_a_prefix_cache_no_prompt_waits_for_another() -> None:
    plan = scheduler(budget=8, enable_prefix_caching=False)
    for name in "ab":
        plan.add(prompt(name, list(range(8))))
    assert [[chunk.sequence.request_id for chunk in launch(plan)] for _ in range(2)] == [["a"], ["b"]]


def test_a_prompt_whose_step_failed_is_shared_with_none() -> None:
    plan, lost = scheduler(budget=8), prompt("a", list(range(8)))
    plan.add(lost)
    (chunk,) = launch(plan)
    plan.add(prompt("b", list(range(8))))
    plan.remove(lost)
    assert plan.check_integrity().owned == 2, "the step in flight still writes to them"
    assert not plan.ended(chunk)
    assert [(chunk.sequence.request_id, chunk.start) for chunk in launch(plan)] == [("b", 0)]


def test_prompts_that_end_with_the_step_in_flight_take_no_place() -> None:
    plan = scheduler(budget=8, max_num_seqs=2)
    for number in range(4):
        plan.add(prompt(f"r{number}", [number] * 4))
    assert [len(launch(plan)) for _ in range(2)] == [2, 2]
