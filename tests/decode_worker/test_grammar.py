"""Answers that must match a grammar, in a batch with others that need not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from diptych.common.model.step_thread import StepThread

from ..engine_rig import prompt

DATE = r"start: /[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]{5,9})?/"
PATTERN = re.compile(rb"\d{4}-\d{2}-\d{2}( [a-z]{5,9})?")
ENDS = (257, 259)


@pytest.fixture(params=["step by step", "ahead"])
def launcher(request: pytest.FixtureRequest) -> Callable[..., Any] | None:
    return StepThread if request.param == "ahead" else None


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 4}])
def test_answers_are_those_of_the_oracle(
    make_engine: Callable[..., Any], launcher: Any, sampling: dict[str, Any]
) -> None:
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=64)
    for i in range(6):
        rig.ask(prompt(20 + 9 * i, i), f"r{i}", max_tokens=30, **({"grammar": DATE} if i % 2 else {}), **sampling)
    rig.until(lambda: rig.is_clean)
    for i in range(6):
        extra = {"grammar": DATE} if i % 2 else {}
        assert rig.tokens(f"r{i}") == rig.oracle(prompt(20 + 9 * i, i), 30, **extra, **sampling)
        if i % 2:
            *text, end = rig.tokens(f"r{i}")
            assert PATTERN.fullmatch(bytes(text)) and end in ENDS


def test_a_preempted_answer_keeps_its_place(make_engine: Callable[..., Any], launcher: Any) -> None:
    """Blocks for fewer sequences than run: some lose theirs, and are computed again."""
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=9, max_num_seqs=4)
    long = "start: /[a-p]{60,70}/"
    for i in range(4):
        rig.ask(prompt(20, i), f"r{i}", max_tokens=80, grammar=long)
    rig.until(lambda: rig.is_clean)
    preempted = sum(rig.deltas(f"r{i}")[-1].timeline.num_preemptions for i in range(4))
    assert preempted > 0
    for i in range(4):
        assert rig.tokens(f"r{i}") == rig.oracle(prompt(20, i), 80, grammar=long)


def test_an_answer_that_moved_here_goes_on_where_it_was(make_engine: Callable[..., Any], launcher: Any) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    whole = rig.oracle(prompt(40), 30, grammar=DATE)
    rig.ask([*prompt(40), *whole[:7]], num_output=7, max_tokens=30, grammar=DATE)
    rig.until(lambda: rig.is_clean)
    tokens = [token_id for delta in rig.deltas() for token_id in delta.token_ids]
    assert tokens == whole[7:]


def test_an_answer_may_be_cut_off(make_engine: Callable[..., Any], launcher: Any) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(40), max_tokens=6, grammar=DATE)
    rig.until(lambda: rig.is_clean)
    assert len(rig.tokens()) == 6 and rig.deltas()[-1].finish_reason == "length"


def test_ends_fill_up_an_answer_that_must_not_end(make_engine: Callable[..., Any], launcher: Any) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(40), max_tokens=9, ignore_eos=True, grammar='start: "yes"')
    rig.until(lambda: rig.is_clean)
    assert bytes(rig.tokens()[:3]) == b"yes" and set(rig.tokens()[3:]) <= set(ENDS) and len(rig.tokens()) == 9


def test_a_grammar_at_fault_fails_its_request_alone(make_engine: Callable[..., Any], launcher: Any) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(30), "bad", grammar="start: nothing")
    rig.ask(prompt(31), "good", grammar=DATE, max_tokens=30)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert failed.phase == "grammar" and not failed.retryable and "unknown name" in failed.message
    assert rig.tokens("good") == rig.oracle(prompt(31), 30, grammar=DATE)


def test_a_worker_without_grammars_refuses_them(make_engine: Callable[..., Any]) -> None:
    rig = make_engine()
    rig.ask(prompt(30), grammar=DATE)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert failed.phase == "queue" and "knows no grammars" in failed.message
