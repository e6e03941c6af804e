"""In which order prompts are computed: by example, and that none waits for ever whatever else arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sequences.prompt_ordering import ELDER_SHARE, PATIENCE_S, prompt_order
from common.latency.step_model import StepModel, StepShape

from ....examples import examples

BUDGET = 64
MODEL = StepModel(token_s=0.01, num_steps=1)
UNKNOWN = StepModel()
FULL_STEP_S = BUDGET * 0.01
"""A step ends at once for all of its prompts: so much later than alone."""


@dataclass(eq=False)
class Prompt:
    """One token takes 10 ms."""

    name: str
    num_tokens: int
    accepted_at: float = 0.0
    due_at: float = math.inf
    has_output: bool = False
    num_computed: int = 0
    priority: int = 0
    done_at: float = math.inf

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def remaining_shape(self) -> StepShape:
        return StepShape.of_prompt(self.num_computed, self.num_tokens)


def names(prompts: Sequence[Prompt], now: float = 0.0, model: StepModel = MODEL) -> str:
    return "".join(prompt.name for prompt in prompt_order(prompts, now, model, BUDGET).prompts)


def test_those_that_will_miss_their_goal_are_named() -> None:
    prompts = [Prompt("a", 20, due_at=0.25), Prompt("b", 20, 0.1, due_at=0.35), Prompt("c", 5, 0.2)]
    order = prompt_order(prompts, 0.0, MODEL, BUDGET)
    assert [order.is_late(prompt) for prompt in prompts] == [False, True, False] and order.num_on_time == 1
    alone = prompt_order(prompts[:1], 0.1, MODEL, BUDGET)
    assert alone.is_late(prompts[0]) and not alone.num_on_time
    assert not prompt_order(prompts[:1], 0.06, MODEL, BUDGET).is_late(prompts[0]), "by 10 ms of 250: who knows"
    assert not prompt_order(prompts[:1], PATIENCE_S + 1, MODEL, BUDGET).is_late(prompts[0]), "the elder has its share"


def compute(prompts: Sequence[Prompt], model: StepModel = MODEL) -> None:
    """Compute all prompts as they arrive."""
    coming, here, now = sorted(prompts, key=lambda prompt: prompt.accepted_at), list[Prompt](), 0.0
    while coming or here:
        now = now if here else max(now, coming[0].accepted_at)
        while coming and coming[0].accepted_at <= now:
            here.append(coming.pop(0))
        order, left, parts = prompt_order(here, now, model, BUDGET), BUDGET, list[tuple[Prompt, int]]()
        assert sorted(map(id, order.prompts)) == sorted(map(id, here))
        for prompt in order.prompts:
            num_tokens = min(left, prompt.num_remaining, order.most_tokens(prompt, BUDGET))
            parts.append((prompt, num_tokens))
            left -= num_tokens
        assert left == 0 or all(prompt.num_remaining == num_tokens for prompt, num_tokens in parts)
        now += MODEL.seconds(StepShape(num_tokens=BUDGET - left))
        for prompt, num_tokens in parts:
            prompt.num_computed += num_tokens
            if not prompt.num_remaining:
                prompt.done_at = now
                here.remove(prompt)


# ---------------------------------------------------------------- without goals


@pytest.mark.parametrize("model", [MODEL, UNKNOWN])
def test_the_shortest_comes_first_and_the_oldest_among_equals(model: StepModel) -> None:
    prompts = [Prompt("a", 30, 0.0), Prompt("b", 20, 0.2), Prompt("c", 20, 0.1), Prompt("d", 40, 0.0, num_computed=35)]
    assert names(prompts, 1.0, model) == "dcba"


def test_what_counts_is_what_is_left() -> None:
    assert names([Prompt("a", 1000, num_computed=990), Prompt("b", 20)]) == "ab"


def test_a_stream_that_stands_still_comes_before_new_prompts() -> None:
    assert names([Prompt("a", 5, due_at=1.0), Prompt("b", 900, 0.5, has_output=True)], 1.0) == "ba"


# ---------------------------------------------------------------- with goals


def test_a_short_prompt_with_little_slack_passes_a_long_one() -> None:
    assert names([Prompt("a", 400, due_at=5.0), Prompt("b", 10, 0.5, due_at=0.7)], 0.5) == "ba"


def test_a_long_prompt_with_little_slack_keeps_its_place() -> None:
    """30 tokens would take more than a quarter of the second that it has to spare."""
    long = Prompt("a", 400, due_at=5.0)
    assert names([long, Prompt("b", 30, 0.1, due_at=9.0)]) == "ab"
    assert names([long, Prompt("b", 20, 0.1, due_at=9.0)]) == "ba"


def test_a_short_prompt_passes_a_long_one_that_can_spare_the_time_though_it_is_due_later() -> None:
    assert names([Prompt("a", 400, due_at=10.0), Prompt("b", 20, 0.1, due_at=10.1)]) == "ba"


def test_prompts_that_will_be_late_come_after_those_that_will_not() -> None:
    prompts = [Prompt("a", 50, due_at=0.4), Prompt("b", 300, due_at=3.1), Prompt("c", 90)]
    assert names(prompts) == "bac"


def test_of_prompts_that_cannot_all_be_in_time_the_longest_gives_way() -> None:
    """Each alone could be; in order of their slack, the first would make the others late."""
    prompts = [Prompt("a", 100, due_at=1.0), Prompt("b", 60, due_at=1.1), Prompt("c", 40, due_at=1.2)]
    assert names(prompts) == "bca"


def test_without_a_known_model_tokens_count() -> None:
    prompts = [Prompt("a", 10), Prompt("b", 900, due_at=3.0), Prompt("c", 5, due_at=4.0), Prompt("d", 1, due_at=0.5)]
    assert names(prompts, 1.0, UNKNOWN) == "cbda"


# ---------------------------------------------------------------- with priorities


def test_priority_comes_before_slack_and_behind_streams_that_stand_still() -> None:
    prompts = [
        Prompt("a", 5, due_at=2.0),
        Prompt("b", 900, priority=1),
        Prompt("c", 9, priority=-1, has_output=True),
        Prompt("d", 20, due_at=30.0, priority=1),
    ]
    assert names(prompts) == "cdba"


def test_a_prompt_behind_those_of_higher_priority_is_late_if_they_make_it_so() -> None:
    prompts = [Prompt("a", 100, priority=1), Prompt("b", 60, due_at=0.7), Prompt("c", 90, due_at=2.0)]
    assert names(prompts) == "acb", "alone, b would be in time and first"


def test_the_elder_may_be_of_the_lowest_priority() -> None:
    old, new = Prompt("a", 50, priority=-5), Prompt("b", 50, PATIENCE_S, priority=5)
    assert names([new, old], PATIENCE_S + 0.1) == "ab" and names([new, old], PATIENCE_S - 0.1) == "ba"


lengths = st.integers(1, 300)


@given(st.lists(st.tuples(lengths, st.floats(0.01, 20.0)), min_size=1, max_size=6))
@settings(derandomize=True, deadline=None, max_examples=examples(50))
def test_prompts_that_can_all_be_in_time_are(wanted: list[tuple[int, float]]) -> None:
    """All are done before one is the elder."""
    prompts = [Prompt(f"{i}", tokens, due_at=due) for i, (tokens, due) in enumerate(wanted)]
    end = 0.0
    for prompt in sorted(prompts, key=lambda prompt: prompt.due_at):
        end += prompt.num_tokens * 0.01
        prompt.due_at = max(prompt.due_at, end + 0.001)
    compute(prompts)
    assert all(prompt.done_at <= prompt.due_at + FULL_STEP_S for prompt in prompts)


@given(st.lists(lengths, max_size=6), st.lists(lengths, min_size=1, max_size=6))
@settings(derandomize=True, deadline=None, max_examples=examples(50))
def test_late_prompts_do_not_delay_others(late: list[int], feasible: list[int]) -> None:
    def good() -> list[Prompt]:
        return [Prompt(f"g{i}", tokens, due_at=30.0) for i, tokens in enumerate(feasible)]

    alone, beside = good(), good()
    compute(alone)
    compute([*beside, *(Prompt(f"l{i}", tokens, due_at=tokens * 0.005) for i, tokens in enumerate(late))])
    assert all(b.done_at <= a.done_at + FULL_STEP_S for a, b in zip(alone, beside, strict=True))


# ---------------------------------------------------------------- nothing starves


def test_the_elder_gets_its_share_of_each_step_and_what_is_left() -> None:
    old, young = Prompt("old", 500, due_at=1.0), Prompt("young", 500, PATIENCE_S, due_at=PATIENCE_S + 6.0)
    order = prompt_order([young, old], PATIENCE_S + 0.1, MODEL, BUDGET)
    assert list(order.prompts) == [old, young]
    assert order.most_tokens(old, BUDGET) == BUDGET * ELDER_SHARE and order.most_tokens(young, BUDGET) == BUDGET
    order = prompt_order([old], PATIENCE_S + 0.1, MODEL, BUDGET)
    assert order.most_tokens(old, BUDGET) == BUDGET


def test_only_the_oldest_is_the_elder() -> None:
    prompts = [Prompt("a", 50, 0.2), Prompt("b", 300, 0.1), Prompt("c", 10, 0.3)]
    assert prompt_order(prompts, PATIENCE_S, MODEL, BUDGET).elder is None
    assert names(prompts, PATIENCE_S + 1.0) == "bca"


arrivals = st.tuples(st.floats(0.0, 30.0), lengths, st.sampled_from([0.0, 0.5, 2.0, 10.0]))


@pytest.mark.slow
@given(st.lists(arrivals, min_size=1, max_size=20), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=examples(20))
def test_every_prompt_is_done_within_a_bound(wanted: list[tuple[float, int, float]], is_known: bool) -> None:
    """Beside short prompts, with goals, that alone are twice what can be computed."""
    prompts = [
        Prompt(f"{i}", tokens, at, at + ttft if ttft else math.inf) for i, (at, tokens, ttft) in enumerate(wanted)
    ]
    flood = [Prompt("f", 20, 0.1 * i, 0.1 * i + 0.5) for i in range(300)]
    compute([*prompts, *flood], MODEL if is_known else UNKNOWN)
    bound = 0.0
    for prompt in sorted([*prompts, *flood], key=lambda prompt: prompt.accepted_at):
        num_steps = math.ceil(prompt.num_tokens / math.ceil(ELDER_SHARE * BUDGET)) + 1
        bound = max(bound, prompt.accepted_at + PATIENCE_S) + num_steps * FULL_STEP_S
        assert prompt.done_at <= bound


def test_a_prompt_alone_needs_no_order() -> None:
    prompt = Prompt("alone", 5)
    assert (prompt_order([prompt], 1.0, MODEL, BUDGET).prompts, list(prompt_order([], 1.0, MODEL, BUDGET).prompts)) == (
        [prompt],
        [],
    )
    order = prompt_order([prompt], prompt.accepted_at + PATIENCE_S + 1.0, MODEL, BUDGET)
    assert (order.prompts, order.elder) == ([prompt], prompt)
