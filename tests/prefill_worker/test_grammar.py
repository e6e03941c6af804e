"""The first token of an answer that must match a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.wire.messages import AbortRequest

from ..engine_rig import ENDLESS, SLOW, Compiler, break_sampling, prompt

AB = 'start: "ab" /[c-f]{3}/'


def test_the_first_token_begins_the_answer(make_engine: Callable[..., Any]) -> None:
    rig = make_engine(grammars=True)
    rig.ask(tokens := prompt(50), grammar=AB)
    rig.ask(prompt(20, 1), "free")
    rig.until(lambda: rig.is_clean)
    assert rig.deltas()[0].token_ids == (ord("a"),) == tuple(rig.oracle(tokens, grammar=AB))
    assert list(rig.deltas("free")[0].token_ids) == rig.oracle(prompt(20, 1))


def test_what_moved_here_goes_on_where_it_was(make_engine: Callable[..., Any]) -> None:
    """The last tokens of its prompt are output of another worker."""
    rig = make_engine(grammars=True)
    for number, (output, expected) in enumerate({"a": "b", "ab": "cdef", "abc": "cdef"}.items()):
        rig.ask([*prompt(40), *output.encode()], f"r{number}", num_output=len(output), max_tokens=8, grammar=AB)
        rig.until(lambda: rig.is_clean)
        (token_id,) = rig.deltas(f"r{number}")[0].token_ids
        assert chr(token_id) in expected


def test_a_grammar_at_fault_fails_its_request_alone(make_engine: Callable[..., Any]) -> None:
    rig = make_engine(grammars=True)
    rig.ask(prompt(30), "bad", grammar="start: nothing")
    rig.ask([*prompt(30), ord("z")], "strayed", num_output=1, max_tokens=8, grammar=AB)
    rig.ask(prompt(30, 2), "good", grammar=AB)
    rig.until(lambda: rig.is_clean)
    for name, why in (("bad", "unknown name"), ("strayed", "doesn't satisfy the grammar")):
        (failed,) = rig.failures(name)
        assert failed.phase == "grammar" and not failed.retryable and why in failed.message
    assert rig.deltas("good")[0].token_ids == (ord("a"),)


@pytest.mark.slow
def test_prompts_go_on_while_a_grammar_is_compiled(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer than anything may: it owns no blocks, and other prompts and grammars do not wait for it."""
    for bound in ("engine.sequences.pending_grammars.GRAMMAR_TIMEOUT_S", "grammar.compiler.WALL_S"):
        monkeypatch.setattr(f"common.{bound}", 120.0)  # a busy machine takes long to find it too complex
    rig = make_engine(grammars=True)
    compiler = Compiler(rig.grammars)
    rig.ask(prompt(30), "endless", grammar=ENDLESS)
    rig.ask(prompt(60), "slow", grammar=SLOW)
    rig.ask(prompt(50), "quick", grammar=AB)
    rig.ask(prompt(20, 1), "free")
    rig.until(lambda: rig.deltas("quick") and rig.deltas("free"))
    assert rig.deltas("quick")[0].token_ids == (ord("a"),)
    scheduler = rig.engine.scheduler
    assert [each.request_id for each in scheduler.unready] == ["endless", "slow"]
    assert scheduler.pool.counts.owned == 0 and not rig.engine.has_work and rig.engine.status.num_waiting == 2
    compiler.go_on()
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("endless")
    assert failed.phase == "grammar" and not failed.retryable and "too complex" in failed.message
    assert list(rig.deltas("slow")[0].token_ids) == rig.oracle(prompt(60), grammar=SLOW)


def test_what_waits_for_its_grammar_can_be_aborted_or_be_too_late(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_engine(grammars=True)
    Compiler(rig.grammars)
    for name in ("aborted", "late"):
        rig.ask(prompt(30), name, grammar=SLOW)
    rig.turn(2)
    rig.tell(AbortRequest(request_id="aborted", attempt=0))
    rig.until(lambda: len(rig.engine.scheduler.unready) == 1)
    monkeypatch.setattr("common.engine.sequences.pending_grammars.GRAMMAR_TIMEOUT_S", 0.05)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("late")
    assert failed.phase == "grammar" and failed.retryable and not rig.failures("aborted")


def test_a_worker_without_grammars_refuses_them(make_engine: Callable[..., Any]) -> None:
    rig = make_engine()
    rig.ask(prompt(30), grammar=AB)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert failed.phase == "queue" and "does not support grammars" in failed.message


@pytest.mark.parametrize(
    "broken", ["common.engine.sampling.sampler.token_mask", "common.engine.sequences.sequence.token_limits"]
)
def test_parameters_that_raise_an_error_fail_their_request_alone(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    rig = make_engine()
    break_sampling(monkeypatch, broken)
    for name, allowed in (("good", (67,)), ("bad", (65, 66)), ("other", ())):
        rig.ask(prompt(20, len(allowed)), name, allowed_token_ids=allowed)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures("bad")
    assert (failed.phase, failed.retryable) == ("sampling", False)
    assert "an unexpected parameter" in failed.message
    assert rig.deltas("good")[0].token_ids == (67,)
    assert list(rig.deltas("other")[0].token_ids) == rig.oracle(prompt(20))
