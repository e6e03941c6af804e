"""Log-probabilities of prompts that a decode worker computes itself, beside those that it decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.engine.run.step_launchers import StepThread
from common.wire.messages import PromptLogprobs, TokenOutput

from ..engine_rig import prompt
from ..prompt_logprobs import check_logprobs, joined

Rig = Any  # EngineRig of conftest, which test modules cannot import


def told(rig: Rig, name: str = "a", attempt: int = 0) -> list[PromptLogprobs]:
    messages = [message for _, message in rig.sent if isinstance(message, PromptLogprobs)]
    return [message for message in messages if (message.request_id, message.attempt) == (name, attempt)]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["", "launched ahead"])
@pytest.mark.parametrize("most", [1024, 7])
def test_logprobs_and_tokens_are_the_oracles(make_engine: Callable[..., Rig], most: int, ahead: bool) -> None:
    rig = make_engine(launcher=StepThread if ahead else None)
    rig.engine.scheduler.max_prompt_logprobs = most
    prompts = {f"r{length}": prompt(length, length) for length in (1, 2, 16, 17, 33, 65, 100)}
    for number, (name, tokens) in enumerate(prompts.items()):
        rig.ask(tokens, name, prompt_logprobs=number % 3, logprobs=number % 2 - 1)
        rig.ask(tokens, name + "-plain")
        rig.turn(3)
    rig.until(lambda: rig.is_clean)
    for number, (name, tokens) in enumerate(prompts.items()):
        check_logprobs(joined(told(rig, name)), rig.model, tokens, number % 3)
        assert rig.tokens(name) == rig.tokens(name + "-plain") == rig.oracle(tokens)
        assert told(rig, name + "-plain") == []


def test_they_come_before_the_first_token(engine: Rig) -> None:
    engine.ask(prompt(100), prompt_logprobs=0)
    engine.until(lambda: engine.is_clean)
    kinds = [type(message) for _, message in engine.sent]
    first = kinds.index(TokenOutput)
    assert first > 1 and kinds == [PromptLogprobs] * first + [TokenOutput] * (len(kinds) - first)


def test_what_is_cached_is_computed_again_and_serves_others(engine: Rig) -> None:
    tokens = prompt(70)
    for name, wanted, cached in (("a", -1, 0), ("b", 2, 0), ("c", -1, 64)):
        engine.ask(tokens, name, prompt_logprobs=wanted)
        engine.until(lambda: engine.is_clean)
        assert engine.deltas(name)[-1].num_cached_tokens == cached
    check_logprobs(joined(told(engine, "b")), engine.model, tokens, 2)


@pytest.mark.slow
def test_who_loses_its_blocks_scores_what_is_not_scored_yet(make_engine: Callable[..., Rig]) -> None:
    """Preempted amid its prompt: it goes on from blocks that are cached still, as far as it had come."""
    rig = make_engine(num_blocks=12, chunk=16, watermark=0.0)
    older, tokens = prompt(60, 1), prompt(100, 2)
    rig.ask(older, "older", max_tokens=60)
    rig.until(lambda: rig.deltas("older"))
    rig.ask(tokens, "with-logprobs", prompt_logprobs=1)
    rig.until(lambda: len(told(rig, "with-logprobs")) >= 2)
    sequence = rig.engine.scheduler.find("with-logprobs")
    rig.engine.scheduler._preempt(sequence)
    rig.until(lambda: rig.is_clean)
    known: dict[int, Any] = {}
    for message in told(rig, "with-logprobs"):
        for position, entry in enumerate(message.logprobs, start=message.start):
            assert known.setdefault(position, entry) == entry
    check_logprobs([known[i] for i in range(1, 100)], rig.model, tokens, 1)
    assert rig.tokens("with-logprobs") == rig.oracle(tokens) and rig.tokens("older") == rig.oracle(older, 60)
    assert sequence.num_preemptions >= 1


def test_another_attempt_begins_anew(engine: Rig) -> None:
    tokens = prompt(100)
    engine.ask(tokens, prompt_logprobs=1)
    engine.until(lambda: engine.deltas())
    engine.ask(tokens, attempt=1, prompt_logprobs=1)
    engine.until(lambda: engine.is_clean)
    check_logprobs(joined(told(engine, attempt=1)), engine.model, tokens, 1)
    assert engine.tokens(attempt=1) == engine.oracle(tokens)


def test_output_is_not_scored(engine: Rig) -> None:
    tokens = prompt(40)
    engine.ask(tokens, num_output=3, max_tokens=8, prompt_logprobs=1)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas() and not told(engine)
