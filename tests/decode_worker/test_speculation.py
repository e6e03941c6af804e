"""Steps that check draft tokens: the same tokens, in fewer steps, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.engine.run.runner import ModelRunner
from common.engine.run.step_launchers import StepThread
from common.engine.sampling.sampler import Sampler
from common.wire.messages import AbortRequest, RequestFailed, TokenOutput
from common.wire.sampling_params import BadWord, SampledToken, ThinkingBudget

from ..engine_rig import prompt
from .handover_pair import Pair
from .lazy_device import LazyDevice
from .prophet import Prophet, counted

Rig = Any  # EngineRig of conftest, which test modules cannot import
LENGTHS = (1, 15, 17, 40)


@pytest.fixture
def prophet(monkeypatch: pytest.MonkeyPatch) -> Prophet:
    return Prophet(monkeypatch)


@pytest.fixture(params=["waited for", "on a thread", "on a lazy device"])
def drafting(
    request: pytest.FixtureRequest, make_engine: Callable[..., Rig], prophet: Prophet
) -> Iterator[Callable[..., Rig]]:
    """Engines that draft token, whose steps are launched in each of the ways there are."""
    threads: list[StepThread] = []

    def threaded(runner: ModelRunner, sampler: Sampler) -> StepThread:
        threads.append(StepThread(runner, sampler))
        return threads[-1]

    launchers = {"waited for": None, "on a thread": threaded, "on a lazy device": LazyDevice}

    def make(**options: object) -> Rig:
        return make_engine(**({"launcher": launchers[request.param], "max_draft_tokens": 5} | options))

    yield make
    for thread in threads:
        thread.close()


def ask(rig: Rig, prophet: Prophet, tokens: list[int], name: str = "a", *, count: int = 40, **params: Any) -> None:
    prophet.learn(tokens, rig.oracle(tokens, count, **params))
    rig.ask(tokens, name, max_tokens=count, **params)


@pytest.mark.quick_cover(1)
@pytest.mark.slow_except("waited for-greedy", "on a thread-greedy", "on a lazy *")
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "seed": 3, "top_p": 0.9},
        {"presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"repetition_penalty": 1.1, "temperature": 0.5},
        {"min_tokens": 30, "logprobs": 2},
        {"logit_bias": ((5, 50.0), (6, 50.0)), "temperature": 1.0},
        {
            "allowed_token_ids": (65, 66, 67, 68),
            "bad_words": tuple(map(BadWord.of, [(65, 65), (66,), (67, 68, 67)])),
            "temperature": 1.0,
        },
        {"thinking": ThinkingBudget(9, (70, 71, 72))},
    ],
    ids=lambda params: "-".join(params) or "greedy",
)
def test_tokens_equal_the_oracle_in_fewer_steps(
    drafting: Callable[..., Rig], prophet: Prophet, params: dict[str, Any]
) -> None:
    rig = drafting(num_blocks=64)
    rig.engine._speculation._max_rows = 64
    for length in LENGTHS:
        ask(rig, prophet, prompt(length, length), f"r{length}", **params)
    rig.until(lambda: rig.is_clean)
    for length in LENGTHS:
        name, expected = f"r{length}", rig.oracle(prompt(length, length), 40, **params)
        assert rig.tokens(name) == expected
        assert rig.reason(name) == "length"
        if "logprobs" in params:
            assert sum(len(delta.logprobs) for delta in rig.deltas(name)) == 40
    counts = counted(rig)
    assert counts["tokens"] == 40 * len(LENGTHS)
    assert counts["steps"] < 32
    assert 0.4 < counts["right"] / counts["drafted"] < 1


@pytest.mark.slow
def test_every_guess_right_makes_as_few_steps_as_there_can_be(
    make_engine: Callable[..., Rig], prophet: Prophet
) -> None:
    rig = make_engine(max_draft_tokens=5)
    prophet.wrong = 0.0
    ask(rig, prophet, prompt(20), count=61)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(20), 61)
    assert counted(rig) == {"steps": 11, "tokens": 61, "drafted": 50, "right": 50}  # the first token, ten times six


@pytest.mark.slow
def test_every_guess_wrong_costs_no_step(make_engine: Callable[..., Rig], prophet: Prophet) -> None:
    rig = make_engine(max_draft_tokens=5)
    prophet.wrong = 1.0
    ask(rig, prophet, prompt(20), count=40)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(20), 40)
    counts = counted(rig)
    assert counts["steps"] == 40 - counts["right"]  # another token may be the true one, once in 256


def test_who_wants_none_gets_none(make_engine: Callable[..., Rig], prophet: Prophet) -> None:
    rig = make_engine(max_draft_tokens=0)
    ask(rig, prophet, prompt(20), count=20)
    rig.until(lambda: rig.is_clean)
    assert counted(rig) == {"steps": 20, "tokens": 20, "drafted": 0, "right": 0}


@pytest.mark.slow
def test_requests_that_come_and_go(drafting: Callable[..., Rig], prophet: Prophet) -> None:
    rig = drafting(num_blocks=48)
    asked = rig.ask

    def ask_foretold(tokens: list[int], name: str, *, max_tokens: int, **options: Any) -> None:
        prophet.learn(tokens, rig.oracle(tokens, max_tokens))
        asked(tokens, name, max_tokens=max_tokens, **options)

    rig.ask = ask_foretold
    rig.mix(0)
    assert counted(rig)["right"] > 20


def test_a_stop_token_within_right_guesses_is_the_last(drafting: Callable[..., Rig], prophet: Prophet) -> None:
    rig = drafting()
    prophet.wrong = 0.0
    full = rig.oracle(prompt(20), 40)
    prophet.learn(prompt(20), full)
    rig.ask(prompt(20), max_tokens=40, stop_token_ids=(full[17],))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == full[: full.index(full[17]) + 1]
    assert rig.reason() == "stop" and counted(rig)["tokens"] == len(rig.tokens())


def test_right_guesses_are_told_before_the_token_that_cannot_be(
    drafting: Callable[..., Rig], prophet: Prophet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth of six rows has logits that are not numbers."""
    rig = drafting()
    prophet.wrong = 0.0
    ask(rig, prophet, prompt(20))
    vocab, take_in = rig.model.config.vocab_size, rig.engine._process_outputs

    def spoilt(chunks: Any, sampled: Any, *more: Any) -> None:
        if len(sampled[0]) == 6:
            sampled = [[*sampled[0][:3], SampledToken(vocab), *sampled[0][4:]]]
        take_in(chunks, sampled, *more)

    monkeypatch.setattr(rig.engine, "_process_outputs", spoilt)
    rig.until(lambda: rig.failures())
    told = [type(message) for _, message in rig.sent]
    assert told[-1] is RequestFailed and told[-2] is TokenOutput
    assert rig.tokens() == rig.oracle(prompt(20), 40)[: len(rig.tokens())] and len(rig.deltas()[-1].token_ids) == 3
    rig.until(lambda: rig.is_clean)


def test_an_aborted_request_gives_its_blocks_back(drafting: Callable[..., Rig], prophet: Prophet) -> None:
    rig = drafting()
    ask(rig, prophet, prompt(20), count=200)
    ask(rig, prophet, prompt(30, 1), "b", count=50)
    rig.until(lambda: len(rig.tokens("b")) > 8)
    rig.tell(AbortRequest(request_id="a", attempt=0))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("b") == rig.oracle(prompt(30, 1), 50)
    assert rig.tokens() == rig.oracle(prompt(20), 200)[: len(rig.tokens())]


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("waited for-8", "waited for-10")
@pytest.mark.parametrize("num_blocks", [8, 10, 12])
def test_preempted_sequences_give_the_same_tokens(
    drafting: Callable[..., Rig], prophet: Prophet, num_blocks: int
) -> None:
    """Draft tokens take no block from a sequence, and none that the pool is short of."""
    rig = drafting(num_blocks=num_blocks, chunk=24)
    for seed in range(4):
        ask(rig, prophet, prompt(20, seed), f"r{seed}")
    rig.until(lambda: rig.is_clean)
    for seed in range(4):
        assert rig.tokens(f"r{seed}") == rig.oracle(prompt(20, seed), 40)
    assert any(rig.deltas(f"r{seed}")[-1].timeline.num_preemptions for seed in range(4))
    assert counted(rig)["right"] > 10


@pytest.mark.slow_except("on a lazy device")
def test_blocks_of_right_guesses_are_cached_as_if_they_had_been_computed_one_by_one(
    drafting: Callable[..., Rig], prophet: Prophet
) -> None:
    rig = drafting()
    prophet.wrong = 0.0
    ask(rig, prophet, prompt(20), count=60)
    rig.until(lambda: rig.is_clean)
    whole = prompt(20) + rig.tokens()
    assert rig.engine.scheduler.pool.counts.cached == (len(whole) - 1) // 16
    rig.ask(whole, "b", max_tokens=5)
    rig.until(lambda: rig.is_clean)
    assert rig.deltas("b")[-1].num_cached_tokens >= 64
    assert rig.tokens("b") == rig.oracle(whole, 5)


def test_a_model_is_not_run_beyond_its_length(drafting: Callable[..., Rig], prophet: Prophet) -> None:
    rig = drafting(num_blocks=3)  # 48 tokens
    prophet.wrong = 0.0
    ask(rig, prophet, prompt(20), count=40)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(20), 28)
    assert rig.reason() == "length" and not rig.failures()


# ---------------------------------------------------------------- grammars

LETTERS = r"start: /[a-p]{30,60}/"
FORCED = 'start: "it says: " /[a-d]{3}/ " and nothing else at all" /[a-d]{3}/ "."'


@pytest.mark.quick_cover(1)
@pytest.mark.slow_except("on a lazy *")
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("grammar", [LETTERS, FORCED], ids=["letters", "forced"])
def test_answers_in_a_grammar_are_those_of_the_oracle(
    drafting: Callable[..., Rig], prophet: Prophet, grammar: str, sampling: dict[str, Any]
) -> None:
    rig = drafting(grammars=True, num_blocks=64)
    for i in range(4):
        ask(rig, prophet, prompt(20 + 9 * i, i), f"r{i}", **({"grammar": grammar} if i % 2 else {}), **sampling)
    rig.until(lambda: rig.is_clean)
    for i in range(4):
        extra = {"grammar": grammar} if i % 2 else {}
        assert rig.tokens(f"r{i}") == rig.oracle(prompt(20 + 9 * i, i), 40, **extra, **sampling)
    assert counted(rig)["right"] > 20


def test_what_a_grammar_forces_needs_no_earlier_text(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_engine(grammars=True, max_draft_tokens=8)
    monkeypatch.setattr(rig.engine._speculation._costs, "seconds", lambda num_rows: 1.0)
    rig.ask(prompt(20), max_tokens=60, grammar='start: "nothing but this"')
    rig.until(lambda: rig.is_clean)
    assert bytes(rig.tokens()[:-1]) == b"nothing but this"
    assert counted(rig)["steps"] <= 4


# ---------------------------------------------------------------- hand-over


@pytest.mark.slow
@pytest.mark.parametrize("reserved", [16, 20, 32])
@pytest.mark.parametrize("length", [1, 13, 16, 100])
def test_a_stream_that_guesses_goes_on_elsewhere(
    make_engine: Callable[..., Rig], prophet: Prophet, length: int, reserved: int
) -> None:
    """Draft tokens in flight when the order comes may be tokens more than the other worker has room for."""
    prophet.wrong = 0.0
    pair = Pair(make_engine, max_draft_tokens=5, launcher=LazyDevice)
    tokens = prompt(length, length)
    prophet.learn(tokens, pair.old.oracle(tokens, 40))
    pair.start(length, tokens=2)
    pair.hand_over(reserved=reserved)
    pair.wait(pair.moved)
    pair.finish()
    assert counted(pair.old)["right"] > 0
