"""What a prefill worker says of prompts that make progress, while their first token does not come yet."""

from __future__ import annotations

from typing import Any

from ..engine_rig import prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import


def test_prompts_that_are_computed_or_wait_behind_them(engine: Rig) -> None:
    engine.ask(prompt(200), "long")
    engine.ask(prompt(220, 1), "behind")
    engine.ask(prompt(230, 2), "other", router=b"another")
    engine.turn()
    assert engine.progress("long", "behind", "other") == ["long", "behind", "other"]
    (router,) = {router for router, m in engine.sent if any(d.request_id == "other" for d in m.outputs)}
    assert router == b"another"
    engine.until(lambda: engine.is_clean)
    assert engine.progress("long", "behind", "other") == []


def test_a_delta_of_an_attempt_that_has_output(engine: Rig) -> None:
    engine.ask(prompt(200), "a", attempt=3, num_output=7)
    engine.turn()
    assert engine.progress("a") == ["a"]
    delta = engine._told("a")[-1]
    assert (delta.attempt, delta.index, delta.token_ids, delta.finish_reason) == (3, 7, (), "")


def test_what_is_computed_makes_none(engine: Rig) -> None:
    """It is the decode worker's to speak from then on."""
    engine.ask(prompt(40), remote=True)
    engine.until(lambda: engine.deltas())
    engine.ask(prompt(200), "b")
    engine.turn()
    assert engine.progress("a", "b") == ["b"]


def test_what_waits_for_room_makes_none(make_engine: Any) -> None:
    """Another worker may have room: it is not to wait here for ever."""
    engine = make_engine(num_blocks=4)
    engine.ask(prompt(60), remote=True)
    engine.until(lambda: engine.deltas())
    engine.ask(prompt(60, 1), "b")
    engine.turn()
    engine.progress("b")  # the first one was computed since
    assert engine.progress("b") == []


def test_it_is_said_once_in_a_while(engine: Rig) -> None:
    engine.ask(prompt(500))
    assert engine.progress("a") == ["a"]
    num_told = len(engine._told("a"))
    engine.turn(3)
    assert len(engine._told("a")) == num_told
