"""Log-probabilities of prompts, computed by a prefill worker alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.wire.messages import AbortRequest, PromptLogprobs, TokenOutput

from ..engine_rig import ROUTER, prompt
from ..prompt_logprobs import check_logprobs, joined

Rig = Any  # EngineRig of conftest, which test modules cannot import


def told(rig: Rig, name: str = "a", attempt: int = 0) -> list[PromptLogprobs]:
    messages = [message for _, message in rig.sent if isinstance(message, PromptLogprobs)]
    return [message for message in messages if (message.request_id, message.attempt) == (name, attempt)]


@pytest.mark.parametrize(
    "most", [1024, pytest.param(24, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
def test_logprobs_are_the_oracles_whatever_the_batch_and_chunks(make_engine: Callable[..., Rig], most: int) -> None:
    rig = make_engine()
    rig.engine.scheduler.max_prompt_logprobs = most
    prompts = {f"r{length}": prompt(length, length) for length in (1, 2, 15, 16, 17, 33, 65, 100)}
    for number, (name, tokens) in enumerate(prompts.items()):
        rig.ask(tokens, name, prompt_logprobs=number % 4)
        rig.ask(tokens, name + "-plain")
    rig.until(lambda: rig.is_clean)
    for number, (name, tokens) in enumerate(prompts.items()):
        check_logprobs(joined(told(rig, name)), rig.model, tokens, number % 4)
        assert [list(rig.deltas(n)[0].token_ids) for n in (name, name + "-plain")] == [rig.oracle(tokens)] * 2
        assert told(rig, name + "-plain") == []


def test_logprobs_alone_and_in_company_are_the_same_to_the_last_bit(make_engine: Callable[..., Rig]) -> None:
    alone, together = make_engine(budget=512), make_engine(budget=48)
    tokens = prompt(90)
    alone.ask(tokens, prompt_logprobs=3)
    for number in range(3):
        together.ask(prompt(40, 9 + number), f"other{number}", prompt_logprobs=number - 1)
    together.ask(tokens, prompt_logprobs=3)
    for rig in (alone, together):
        rig.until(lambda rig=rig: rig.is_clean)
    assert joined(told(alone)) == joined(told(together))
    assert len(told(together)) > len(told(alone))


def test_they_come_before_the_first_token(engine: Rig) -> None:
    engine.ask(prompt(100), prompt_logprobs=0)
    engine.until(lambda: engine.is_clean)
    kinds = [type(message) for router, message in engine.sent if router == ROUTER]
    assert kinds == [PromptLogprobs] * (len(kinds) - 1) + [TokenOutput] and len(kinds) > 2


def test_what_is_cached_is_computed_again_and_serves_others(engine: Rig) -> None:
    tokens = prompt(70)
    for name, wanted, cached in (("a", -1, 0), ("b", 2, 0), ("c", -1, 64), ("d", 0, 0)):
        engine.ask(tokens, name, prompt_logprobs=wanted)
        engine.until(lambda: engine.is_clean)
        assert engine.deltas(name)[0].num_cached_tokens == cached
    for name, count in (("b", 2), ("d", 0)):
        check_logprobs(joined(told(engine, name)), engine.model, tokens, count)


def test_another_attempt_tells_them_again(engine: Rig) -> None:
    tokens = prompt(100)
    engine.ask(tokens, prompt_logprobs=1)
    engine.turn(2)
    engine.ask(tokens, attempt=1, prompt_logprobs=1)
    engine.until(lambda: engine.is_clean)
    assert 0 < len(joined(told(engine))) < 99
    check_logprobs(joined(told(engine, attempt=1)), engine.model, tokens, 1)


def test_output_is_not_scored(engine: Rig) -> None:
    tokens = prompt(40)
    engine.ask(tokens, num_output=3, max_tokens=4, prompt_logprobs=1)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas() and not told(engine)


def test_those_who_score_leave_room_in_the_step_for_others(make_engine: Callable[..., Rig]) -> None:
    rig = make_engine(budget=64)
    rig.engine.scheduler.max_prompt_logprobs = 16
    rig.ask(prompt(100), "with-logprobs", prompt_logprobs=0)
    rig.ask(prompt(40, 1), "plain")
    rig.turn()
    assert rig.deltas("plain") and len(joined(told(rig, "with-logprobs"))) == 16
    rig.tell(AbortRequest(request_id="with-logprobs", attempt=0))
    rig.until(lambda: rig.is_clean)
    assert not rig.deltas("with-logprobs")
