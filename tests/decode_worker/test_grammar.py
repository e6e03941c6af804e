"""Answers that must match a grammar, in a batch with others that need not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.run.step_launchers import StepThread
from common.wire.messages import AbortRequest
from common.wire.sampling_params import BadWord, ThinkingBudget
from decode_worker.sequence import RequestStatus

from ..engine_rig import ENDLESS, SLOW, Compiler, break_sampling, prompt

DATE = r"start: /[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]{5,9})?/"
PATTERN = re.compile(rb"\d{4}-\d{2}-\d{2}( [a-z]{5,9})?")
ENDS = (257, 259)


@pytest.fixture(params=["step by step", "ahead"])
def launcher(request: pytest.FixtureRequest) -> Callable[..., Any] | None:
    return StepThread if request.param == "ahead" else None


@pytest.mark.slow_except("ahead-sampling0")
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


@pytest.mark.slow
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


@pytest.mark.slow_cases("step by step")
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


THOUGHT_FIRST = f'start: closing DATE\nclosing[lazy]: /(?s:.*)/ "</think>"\nDATE{DATE.removeprefix("start")}\n'
END_OF_THOUGHT = [*b"</think>"]


@pytest.mark.slow_cases("step by step")
def test_a_form_follows_a_thought_of_bounded_length(make_engine: Callable[..., Any], launcher: Any) -> None:
    """Also with drafts, and in answers that moved here within the thought, within its mark or within the form."""
    asked = {"max_tokens": 120, "temperature": 1.3, "grammar": THOUGHT_FIRST}
    budgets, expected = [0, 1, 9, 30, 31, 32], list[list[int]]()
    for options in ({}, {"max_draft_tokens": 5}):
        rig = make_engine(grammars=True, launcher=launcher, num_blocks=96, **options)
        for i, budget in enumerate(budgets):
            thinking = ThinkingBudget(budget, tuple(END_OF_THOUGHT))
            rig.ask(prompt(20, i), f"r{i}", seed=i, thinking=thinking, **asked)
        rig.until(lambda rig=rig: rig.is_clean)
        answers = [rig.tokens(f"r{i}") for i in range(len(budgets))]
        expected = expected or answers
        assert answers == expected
    for budget, (*text, end) in zip(budgets, expected, strict=True):
        thought, _, date = bytes(text).partition(bytes(END_OF_THOUGHT))
        assert budget <= len(thought) < budget + 4 and thought.decode() is not None  # a character is not split
        assert PATTERN.fullmatch(date) and end in ENDS
    for known in (5, 34, 45):
        thinking = ThinkingBudget(budgets[3], tuple(END_OF_THOUGHT))
        tokens = [*prompt(20, 3), *expected[3][:known]]
        rig.ask(tokens, f"moved{known}", num_output=known, seed=3, thinking=thinking, **asked)
        rig.until(lambda rig=rig: rig.is_clean)
        assert rig.tokens(f"moved{known}") == expected[3][known:]


@pytest.mark.slow_cases("ahead")
def test_a_grammar_at_fault_fails_its_request_alone(make_engine: Callable[..., Any], launcher: Any) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(30), "bad", grammar="start: nothing")
    rig.ask(prompt(31), "good", grammar=DATE, max_tokens=30)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert failed.phase == "grammar" and not failed.retryable and "unknown name" in failed.message
    assert rig.tokens("good") == rig.oracle(prompt(31), 30, grammar=DATE)


@pytest.mark.slow
def test_a_stream_goes_on_while_a_grammar_is_compiled(make_engine: Callable[..., Any], launcher: Any) -> None:
    """One that takes longer than anything may: another grammar is compiled and used meanwhile."""
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=64)
    compiler = Compiler(rig.grammars)
    rig.ask(prompt(20), "running", max_tokens=40, ignore_eos=True)
    rig.until(lambda: len(rig.tokens("running")) > 1)
    rig.ask(prompt(30), "endless", grammar=ENDLESS)
    rig.ask(prompt(31), "quick", grammar=DATE, max_tokens=30)
    rig.until(lambda: rig.deltas("quick") and rig.deltas("quick")[-1].finish_reason)
    rig.until(lambda: rig.deltas("running")[-1].finish_reason)
    assert rig.tokens("running") == rig.oracle(prompt(20), 40, ignore_eos=True)
    assert rig.tokens("quick") == rig.oracle(prompt(31), 30, grammar=DATE)
    assert not rig.deltas("endless") and not rig.failures("endless")
    sequence = rig.engine.scheduler.find("endless")
    rig.until(lambda: not rig.engine.has_work)  # a step was launched before the last answer's end was known
    assert sequence.blocks == [] and rig.engine.status.num_waiting == 1
    compiler.go_on()
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("endless")
    assert failed.phase == "grammar" and not failed.retryable and "too complex" in failed.message


def test_kv_is_not_granted_room_before_its_grammar_is_there(make_engine: Callable[..., Any], launcher: Any) -> None:
    """The prefill worker holds the KV meanwhile, and other KV does not wait behind it."""
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=64)
    compiler = Compiler(rig.grammars)
    late, early = prompt(40), prompt(50, 1)
    for name, tokens, grammar in (("late", late, SLOW), ("early", early, "")):
        rig.ask(tokens, name, remote=True, max_tokens=20, grammar=grammar)
        rig.peer.open(name, -(-len(tokens) // 16))
    rig.until(lambda: len(rig.engine.scheduler) == 2)
    rig.until(lambda: rig.engine.scheduler.find("early").status is RequestStatus.TRANSFERRING)
    waiting = rig.engine.scheduler.find("late")
    rig.until(lambda: waiting.status is RequestStatus.OPENED)
    rig.turn(3)
    assert waiting.status is RequestStatus.OPENED and waiting.blocks == []
    compiler.go_on()
    rig.until(lambda: waiting.status is RequestStatus.TRANSFERRING)
    for name in ("late", "early"):
        rig.tell(AbortRequest(request_id=name, attempt=0))
    rig.until(lambda: rig.is_clean)


def test_what_waits_for_its_grammar_can_be_aborted_or_computed_here(
    make_engine: Callable[..., Any], launcher: Any
) -> None:
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=64)
    compiler = Compiler(rig.grammars)
    for name in ("aborted", "here", "opened"):
        rig.ask(prompt(40), name, remote=name != "aborted", max_tokens=30, grammar=SLOW)
    rig.peer.open("opened", 3)
    rig.until(lambda: len(rig.engine.scheduler.unready) == 2)
    rig.tell(AbortRequest(request_id="aborted", attempt=0))
    rig.ask(prompt(40), "here", attempt=1, max_tokens=30, grammar=SLOW)
    rig.ask(prompt(40), "opened", attempt=1, max_tokens=30, grammar=SLOW)
    rig.until(lambda: rig.engine.scheduler.find("aborted") is None)
    rig.turn(3)
    assert sorted(each.request_id for each in rig.engine.scheduler.unready) == ["here", "opened"]
    compiler.go_on()
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("here", attempt=1) == rig.tokens("opened", attempt=1) == rig.oracle(prompt(40), 30, grammar=SLOW)
    assert not rig.deltas("aborted") and not rig.failures("aborted")


def test_a_grammar_that_nobody_finds_time_for_moves_its_request(
    make_engine: Callable[..., Any], launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    Compiler(rig.grammars)
    monkeypatch.setattr("common.engine.sequences.pending_grammars.GRAMMAR_TIMEOUT_S", 0.05)
    rig.ask(prompt(40), grammar=SLOW)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert failed.phase == "grammar" and failed.retryable and "longer than 0.05 s" in failed.message


def test_a_worker_without_grammars_refuses_them(make_engine: Callable[..., Any]) -> None:
    rig = make_engine()
    rig.ask(prompt(30), grammar=DATE)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert failed.phase == "queue" and "does not support grammars" in failed.message


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize(("slow_s", "step_s"), [(0.0, 60.0), (60.0, -1.0)], ids=["all slow", "all late"])
def test_answers_whose_masks_are_computed_outside_of_steps_are_those_of_the_oracle(
    make_engine: Callable[..., Any],
    launcher: Any,
    monkeypatch: pytest.MonkeyPatch,
    slow_s: float,
    step_s: float,
    drafts: int,
) -> None:
    """With blocks for fewer than run, so that some are preempted meanwhile."""
    monkeypatch.setattr("common.grammar.grammar.SLOW_MASK_S", slow_s)
    monkeypatch.setattr("decode_worker.rules.STEP_S", step_s)
    long = 'start: /[a-p]{20}/ "forced text" /[0-9]{20}/'
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=9, max_num_seqs=4, max_draft_tokens=drafts)
    for i in range(5):
        rig.ask(prompt(20, i), f"r{i}", max_tokens=60, **({} if i == 4 else {"grammar": long}))
    rig.until(lambda: rig.is_clean)
    for i in range(5):
        expected = rig.oracle(prompt(20, i), 60, **({} if i == 4 else {"grammar": long}))
        assert rig.tokens(f"r{i}") == expected, f"r{i}"


def test_a_stream_goes_on_while_a_mask_is_computed(
    make_engine: Callable[..., Any], launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.grammar.grammar.SLOW_MASK_S", 0.0)
    rig = make_engine(grammars=True, launcher=launcher, num_blocks=64)
    held: list[Any] = []
    compute = rig.grammars.compute_mask
    rig.grammars.compute_mask = lambda *job: held.append(job)
    rig.ask(prompt(30), "slow", grammar=DATE, max_tokens=30)
    rig.until(lambda: held)
    rig.ask(prompt(20), "running", max_tokens=40, ignore_eos=True)
    rig.until(lambda: rig.deltas("running") and rig.deltas("running")[-1].finish_reason)
    rig.until(lambda: not rig.engine.has_work)
    assert rig.tokens("running") == rig.oracle(prompt(20), 40, ignore_eos=True)
    assert rig.progress("slow") == ["slow"], "its router must not take the worker for silent"
    assert len(held) == 1 and not rig.engine.is_empty
    rig.grammars.compute_mask = compute
    compute(*held[0])
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("slow") == rig.oracle(prompt(30), 30, grammar=DATE)


def test_what_waits_for_its_mask_can_be_aborted(
    make_engine: Callable[..., Any], launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.grammar.grammar.SLOW_MASK_S", 0.0)
    rig = make_engine(grammars=True, launcher=launcher)
    held: list[Any] = []
    compute = rig.grammars.compute_mask
    rig.grammars.compute_mask = lambda *job: held.append(job)
    rig.ask(prompt(30), "slow", grammar=DATE, max_tokens=30)
    rig.until(lambda: held)
    rig.tell(AbortRequest(request_id="slow", attempt=0))
    rig.until(lambda: rig.is_clean)
    compute(*held[0])
    rig.grammars.compute_mask = compute
    rig.ask(prompt(31), "slow", attempt=1, grammar=DATE, max_tokens=30)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("slow", attempt=1) == rig.oracle(prompt(31), 30, grammar=DATE)


def test_an_answer_whose_masks_take_too_long_fails_alone(
    make_engine: Callable[..., Any], launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(31), "good", max_tokens=30)
    monkeypatch.setattr("common.grammar.grammar.MASKS_S", 0.0)
    monkeypatch.setattr("common.grammar.grammar.MASKS_PER_TOKEN_S", 0.0)
    rig.ask(prompt(30), "bad", grammar=DATE)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert failed.phase == "grammar" and not failed.retryable and "too ambiguous" in failed.message
    assert rig.tokens("good") == rig.oracle(prompt(31), 30)


def test_masks_of_another_size_than_the_logits_fail_their_request_alone(
    make_engine: Callable[..., Any], launcher: Any
) -> None:
    rig = make_engine(grammars=True, launcher=launcher)
    rig.ask(prompt(31), "good", max_tokens=30)
    right, rig.grammars._vocab_size = rig.grammars._vocab_size, 64
    rig.ask(prompt(30), "bad", grammar=DATE)
    rig.until(lambda: rig.failures("bad"))
    rig.grammars._vocab_size = right
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert failed.phase == "grammar" and "Invalid buffer size" in failed.message
    assert rig.tokens("good") == rig.oracle(prompt(31), 30)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(
    "broken", ["common.engine.sampling.sampler.token_mask", "common.engine.sequences.sequence.token_limits"]
)
def test_parameters_that_raise_an_error_fail_their_request_alone(
    make_engine: Callable[..., Any], launcher: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whatever the parameter: here a list of tokens that one request has."""
    rig = make_engine(launcher=launcher)
    break_sampling(monkeypatch, broken)
    bad_words = (BadWord.of([65, 66]),)
    others = {"free": {}, "held": {"allowed_token_ids": (66, 67), "bad_words": bad_words}, "less": {"min_tokens": 3}}
    for name, fields in others.items():
        rig.ask(prompt(31), name, max_tokens=30, **fields)
    rig.ask(prompt(30), "bad", allowed_token_ids=(65, 66), bad_words=bad_words, max_tokens=30)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert (failed.phase, failed.retryable) == ("sampling", False)
    assert "an unexpected parameter" in failed.message
    for name, fields in others.items():
        assert rig.tokens(name) == rig.oracle(prompt(31), 30, **fields)
