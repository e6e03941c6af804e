"""What a prefill worker computes next: by example, and under any interleaving of what can happen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.blocks.block_hash import BlockHasher
from common.engine.kv.block_pool import BlockPool
from common.engine.sequences.prompt_ordering import PATIENCE_S
from common.engine.sequences.step_budget import Knob
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import PrefillRequest
from common.wire.sampling_params import SamplingParams
from prefill_worker.scheduler import PrefillScheduler, PrefillSequence

from ..examples import examples

SIZE = 4
MODEL = StepModel()
PARAMS = SamplingParams(max_tokens=8)


def scheduler(
    num_blocks: int = 32, budget: int = 8, max_num_seqs: int = 4, window: int = 0, *, enable_prefix_caching: bool = True
) -> PrefillScheduler:
    pool = BlockPool(num_blocks, SIZE, enable_prefix_caching=enable_prefix_caching)
    return PrefillScheduler(pool, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, window=window)


def prompt(
    name: str, tokens: list[int], at: float = 0.0, salt: str = "", ttft_s: float = 0.0, priority: int = 0
) -> PrefillSequence:
    request = PrefillRequest(
        request_id=name,
        attempt=0,
        prompt=pack_tokens(tokens),
        params=PARAMS,
        cache_salt=salt,
        ttft_s=ttft_s,
        priority=priority,
    )
    return PrefillSequence(b"router", request, tokens, BlockHasher(SIZE, salt), at, at + 60.0)


def run(plan: PrefillScheduler) -> list[tuple[str, int, int]]:
    """Compute one step; what was in it: (name, first token, number of tokens)."""
    chunks = plan.schedule(1.0, MODEL).chunks
    for chunk in chunks:
        plan.advance(chunk, 2.0)
    return [(chunk.sequence.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("a", list(range(20))))
    assert [run(plan) for _ in range(4)] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)], []]


def test_short_prompts_share_a_step_oldest_first() -> None:
    plan = scheduler(budget=8)
    for number, name in enumerate("abc"):
        plan.add(prompt(name, [number] * 3))
    assert run(plan) == [("a", 0, 3), ("b", 0, 3), ("c", 0, 2)]
    assert run(plan) == [("c", 2, 1)]


def test_only_the_chunk_that_ends_the_prompt_samples() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("a", list(range(9))))
    assert [chunk.sample for chunk in plan.schedule(0.0, MODEL).chunks] == [False]
    run(plan)
    assert [chunk.sample for chunk in plan.schedule(0.0, MODEL).chunks] == [True]


def test_blocks_are_held_until_removed() -> None:
    plan = scheduler()
    plan.add(prompt("a", list(range(8))))
    run(plan)
    assert not plan.has_work and plan.check_integrity().owned == 2
    held = plan.find("a")
    assert held is not None
    plan.remove(held)
    plan.remove(held)
    assert plan.check_integrity().cached == 2


def test_a_long_queue_is_planned_once_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, planned = scheduler(num_blocks=4, max_num_seqs=2), list[object]()
    match = plan.pool.match
    monkeypatch.setattr(plan.pool, "match", lambda hashes: planned.append(hashes) or match(hashes))
    plan.add(prompt("held", [1] * 2 * SIZE))
    run(plan)
    for number in range(1000):
        plan.add(prompt(f"r{number}", [2, number] * 6, at=1.0))
    planned.clear()
    assert not any(plan.has_work for _ in range(8))
    assert len(planned) == 1000
    plan.add(prompt("short", [3] * SIZE, at=2.0))
    assert plan.has_work
    assert run(plan) == [("short", 0, SIZE)] and not plan.has_work
    plan.remove(plan.held["held"])
    assert plan.has_work


def sizes(plan: PrefillScheduler, now: float) -> dict[str, int]:
    """Tokens of each prompt in the next step at `now`, where one takes a millisecond and each step 60 more."""
    model = StepModel(fixed_s=0.06, token_s=1e-3, num_steps=100)
    chunks = plan.schedule(now, model).chunks
    for chunk in chunks:
        plan.advance(chunk, now)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_prompts_that_miss_their_goal_leave_room_for_those_that_may_meet_it() -> None:
    plan = scheduler(num_blocks=2000, budget=512)
    for name in ("a", "b", "c"):
        plan.add(prompt(name, [ord(name)] * 400, ttft_s=0.7))
    assert sizes(plan, 0.0) == {"a": 400}, "the others will be late, and would make it late too"
    assert sizes(plan, 0.5) == {"b": 150}, "one that comes meanwhile waits for a small step alone"
    plan.add(prompt("d", [7] * 300, at=0.55, ttft_s=0.5))
    assert sizes(plan, 0.57) == {"d": 300}
    assert sizes(plan, 0.9) == {"b": 150}
    assert sizes(plan, 6.0) == {"b": 100, "c": 380}, "nobody was on time for long: small steps would help nobody"


def test_the_elder_has_its_share_though_it_is_late() -> None:
    plan, now = scheduler(num_blocks=2000, budget=512), PATIENCE_S + 1.0
    plan.add(prompt("elder", [9] * 500, ttft_s=0.1))
    plan.add(prompt("new", [7] * 10, at=now, ttft_s=0.5))
    assert sizes(plan, now) == {"elder": 470, "new": 10}, "a larger step would not complete it either"


def test_a_step_is_extended_to_the_rest_of_the_first_prompt_if_it_is_ready() -> None:
    model = StepModel(fixed_s=0.06, token_s=1e-3, num_steps=100)
    plan = scheduler(num_blocks=2000, budget=512)
    first, second = prompt("a", [9] * 500, ttft_s=5.0), prompt("b", [7] * 800, at=0.1, ttft_s=5.0)
    plan.add(first)
    plan.add(second)
    read: Any = "in progress"
    plan.schedule(0.2, model, lambda admitted: setattr(first, "read", read))
    assert [(chunk.sequence, chunk.num_tokens) for chunk in plan.schedule(0.2, model).chunks] == [(second, 480)]
    first.read = None
    assert [(chunk.sequence, chunk.num_tokens) for chunk in plan.schedule(0.2, model).chunks] == [(first, 500)]


def batch_of(plan: PrefillScheduler, count: int, priority: int = -5) -> None:
    """So many prompts of two blocks, computed as far as blocks go; no decode worker has room for their KV."""
    for number in range(count):
        plan.add(prompt(f"batch{number}", [number] * 2 * SIZE, priority=priority))
    for _ in range(count):
        run(plan)


def test_prompts_of_low_priority_leave_blocks_to_others() -> None:
    plan = scheduler(num_blocks=16)
    batch_of(plan, 12)
    assert len(plan.held) == 6 and plan.num_waiting == 6 and not plan.has_work
    for number in range(2):
        plan.add(prompt(f"chat{number}", [20 + number] * 2 * SIZE, at=1.0))
        assert run(plan) == [(f"chat{number}", 0, 8)]
    assert plan.check_integrity().owned == 16
    plan.remove(plan.held["batch0"])
    assert run(plan) == [("batch6", 0, 8)], "room at a decode worker lets the next one in"


def test_prompts_of_one_priority_may_own_all_blocks() -> None:
    plan = scheduler(num_blocks=16)
    batch_of(plan, 12, priority=0)
    assert len(plan.held) == 8
    plan.add(prompt("urgent", [30] * 2 * SIZE, priority=5))
    for number in range(2):
        plan.remove(plan.held[f"batch{number}"])
    assert run(plan) == [("urgent", 0, 8)], "0 is low now: no other has taken the room"
    assert run(plan) == []


def test_a_prompt_of_low_priority_that_needs_most_blocks_is_computed_alone() -> None:
    plan = scheduler(num_blocks=16, budget=64)
    plan.add(prompt("long", list(range(15 * SIZE)), priority=-5))
    assert run(plan) == [("long", 0, 60)]
    plan.add(prompt("next", [9] * SIZE, priority=-5))
    assert run(plan) == []
    plan.remove(plan.held["long"])
    assert run(plan) == [("next", 0, 4)]


def test_a_prefix_hit_computes_the_rest_and_at_least_one_token() -> None:
    plan = scheduler()
    plan.add(prompt("a", list(range(8))))
    run(plan)
    plan.add(prompt("b", list(range(8))))
    assert run(plan) == [("b", 4, 4)]
    second = plan.find("b")
    assert second is not None and second.num_cached == 4


def test_salts_do_not_share_blocks() -> None:
    plan = scheduler()
    plan.add(prompt("a", list(range(8)), salt="x"))
    run(plan)
    plan.add(prompt("b", list(range(8)), salt="y"))
    assert run(plan) == [("b", 0, 8)]


def test_a_short_prompt_passes_a_long_one_between_two_chunks() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("long", [1] * 20))
    assert run(plan) == [("long", 0, 8)]
    plan.add(prompt("short", [2] * 3, at=1.0))
    assert run(plan) == [("short", 0, 3), ("long", 8, 5)]


def test_a_prompt_with_little_slack_passes_a_shorter_one() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("short", [1] * 6, ttft_s=30.0))
    plan.add(prompt("due", [2] * 16, ttft_s=2.0))
    model = StepModel(token_s=0.1, num_steps=1)
    assert [chunk.sequence.request_id for chunk in plan.schedule(0.0, model).chunks] == ["due"]


def test_prompts_own_no_blocks_before_their_turn() -> None:
    plan = scheduler(budget=8)
    for number, name in enumerate("abcd"):
        plan.add(prompt(name, [number] * 16))
    run(plan)
    assert [s.request_id for s in plan.running] == ["a"] and plan.check_integrity().owned == 4


def test_an_old_prompt_gets_a_share_of_each_step() -> None:
    plan = scheduler(budget=8)
    plan.add(prompt("old", [1] * 12, at=-PATIENCE_S))
    plan.add(prompt("short", [2] * 8, at=0.5))
    assert run(plan) == [("old", 0, 1), ("short", 0, 7)]


def test_the_oldest_is_passed_by_as_many_blocks_as_it_needs() -> None:
    plan = scheduler(num_blocks=4, budget=16)
    plan.add(prompt("held", [1] * 4))
    run(plan)
    plan.add(prompt("big", [2] * 16))  # needs all blocks
    for number in range(6):
        plan.add(prompt(f"small-{number}", [3 + number] * 4))
    done = []
    while plan.has_work:
        done += [name for name, *_ in run(plan)]
        for sequence in list(plan.held.values()):
            if sequence.request_id != "held":
                plan.remove(sequence)
    assert done == [f"small-{number}" for number in range(4)]
    held = plan.find("held")
    assert held is not None
    plan.remove(held)
    assert plan.has_work and run(plan) == [("big", 0, 16)]


def test_waiting_tokens_are_those_not_computed() -> None:
    plan = scheduler(budget=8, max_num_seqs=1)
    plan.add(prompt("a", [1] * 12))
    plan.add(prompt("b", [2] * 5))
    assert plan.num_waiting_tokens == 17
    run(plan)
    assert plan.num_waiting_tokens == 12


class SchedulerMachine(RuleBasedStateMachine):
    """`cells` models the KV cache: the history that each slot was computed from."""

    BUDGET, MAX_SEQS, BLOCKS, WINDOW, LONGER = 6, 3, 14, 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.plan = scheduler(self.BLOCKS, self.BUDGET, self.MAX_SEQS, self.WINDOW)
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.count, self.now = 0, 0.0

    @rule(
        family=st.integers(0, 2), shared=st.integers(0, 16), own=st.integers(1, 12),
        ttft_s=st.sampled_from([0.0, 0.001, 3.0, 30.0]),
    )  # fmt: skip
    def add(self, family: int, shared: int, own: int, ttft_s: float) -> None:
        self.count += 1
        tokens = [family] * shared * self.LONGER + [100 + self.count] * own
        self.plan.add(prompt(f"r{self.count}", tokens, self.now, ttft_s=ttft_s))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2 * PATIENCE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(fails=st.booleans(), is_known=st.booleans())
    def step(self, fails: bool, is_known: bool) -> None:
        had_work, waiting = self.plan.has_work, list(self.plan.waiting)
        output = self.plan.schedule(self.now, StepModel(fixed_s=0.1, token_s=0.2, num_steps=1) if is_known else MODEL)
        assert bool(output.chunks) == had_work
        assert sum(chunk.num_tokens for chunk in output.chunks) <= self.BUDGET
        assert all(sequence.num_passing_blocks <= self.plan.blocks_for(sequence.num_tokens) for sequence in waiting)
        if fails:
            for sequence in {chunk.sequence.request_id: chunk.sequence for chunk in output.chunks}.values():
                self.plan.remove(sequence)
            return
        for chunk in output.chunks:
            assert chunk.num_tokens > 0 and chunk.start == chunk.sequence.num_computed
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.cells[self.cell(chunk.sequence, position)] = tuple(chunk.sequence.token_ids[: position + 1])
            self.plan.advance(chunk, 0.0)

    @precondition(lambda self: len(self.plan) > 0)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Acknowledged or aborted, in whatever state."""
        self.plan.remove(data.draw(st.sampled_from(sorted(self.plan, key=lambda s: s.accepted_at))))

    @rule()
    def reset(self) -> None:
        self.plan.pool.reset_cache()

    @staticmethod
    def cell(sequence: PrefillSequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // SIZE], position % SIZE

    @invariant()
    def every_block_has_its_owner(self) -> None:
        self.plan.check_integrity()
        assert len(self.plan.running) <= self.MAX_SEQS
        assert [s.accepted_at for s in self.plan.waiting] == sorted(s.accepted_at for s in self.plan.waiting)

    @invariant()
    def what_counts_as_computed_was_computed_from_this_prompt(self) -> None:
        for sequence in self.plan:
            gone, computed = sequence.num_gone, sequence.num_computed
            assert gone == self.plan.window.first_block(computed)
            for position in range(max(gone * SIZE, computed + 1 - (self.WINDOW or computed + 1)), computed):
                assert self.cells[self.cell(sequence, position)] == tuple(sequence.token_ids[: position + 1])

    def teardown(self) -> None:
        for _ in range(1000):
            for sequence in list(self.plan.held.values()):
                self.plan.remove(sequence)
            if not self.plan.has_work:
                break
            self.step(fails=False, is_known=True)
        assert len(self.plan) == 0
        assert self.plan.check_integrity().owned == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=examples(60), stateful_step_count=50
)


class WindowedMachine(SchedulerMachine):
    """The model looks back at few tokens, and some prompts have more blocks than the worker."""

    WINDOW, LONGER = 5, 4


TestWindowedMachine = WindowedMachine.TestCase
TestWindowedMachine.settings = TestSchedulerMachine.settings


def test_steps_are_small_while_prompts_have_goals_and_full_otherwise() -> None:
    model = StepModel(fixed_s=1e-2, token_s=1e-3, num_steps=16)
    plan = scheduler(num_blocks=512, budget=512)
    plan.add(prompt("a", list(range(1000))))
    assert [chunk.num_tokens for chunk in plan.schedule(0.0, model).chunks] == [512]
    assert plan.step_tokens == Knob(512, "bound")
    plan.add(prompt("b", list(range(600)), ttft_s=3.0))
    assert sum(chunk.num_tokens for chunk in plan.schedule(0.1, model).chunks) == plan.max_step_tokens < 512
    assert plan.step_tokens.reason == "efficiency"
