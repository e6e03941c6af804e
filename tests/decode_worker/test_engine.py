"""The decode engine over a tiny real model, prompts prefilled locally: the right tokens, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from common.engine.sampling.penalties import TokenCounts
from common.engine.transfer.receiver import TransferFailed
from common.engine.worker.contract import RouterLost
from common.engine.worker.loop import MAX_FAILED_STEPS
from common.wire.messages import AbortRequest, PrefillRequest, ResetPrefixCache, RouterHeartbeat
from common.wire.sampling_params import SamplingParams

from ..engine_rig import check_device_loss, prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 1.5, "top_k": 5}])
def test_tokens_equal_the_oracle_whatever_the_batch(engine: Rig, params: dict[str, object]) -> None:
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 40, 70)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=20, **params)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 20, **params)
        assert engine.reason(name) == "length"


@pytest.mark.parametrize(
    "num_blocks", [pytest.param(8, marks=pytest.mark.slow), 10, pytest.param(12, marks=pytest.mark.slow)]
)
def test_preempted_sequences_give_the_same_tokens(make_engine: Callable[..., Rig], num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks, chunk=24)
    prompts = {f"r{seed}": prompt(20, seed) for seed in range(4)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=60)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 60)
    assert any(engine.deltas(name)[-1].timeline.num_preemptions for name in prompts)
    assert not engine.deltas("r0")[-1].timeline.num_preemptions  # the oldest goes through


@pytest.mark.slow
def test_a_sequence_is_counted_once_for_its_penalties(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each token, nor again after a preemption: a prompt may have a hundred thousand tokens."""
    counted: list[int] = []
    count = TokenCounts.__init__

    def noted(self: TokenCounts, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        counted.append(len(prompt))
        count(self, prompt, output)

    engine = make_engine(num_blocks=10, chunk=24)
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "temperature": 0.7, "seed": 1}
    prompts = {f"r{seed}": prompt(20 + seed, seed) for seed in range(4)}
    monkeypatch.setattr(TokenCounts, "__init__", noted)
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=60, **params)
    engine.until(lambda: engine.is_clean)
    assert sorted(counted) == [20, 21, 22, 23]
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 60, **params)
    assert any(engine.deltas(name)[-1].timeline.num_preemptions for name in prompts)


def test_a_long_prompt_here_never_takes_more_than_its_chunk(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[int]] = []
    forward = engine.engine._runner.forward

    def recording(chunks: list[Any]) -> object:
        steps.append(sorted(len(chunk.token_ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(engine.engine._runner, "forward", recording)
    engine.ask(prompt(10), "short", max_tokens=30)
    engine.turn(2)
    engine.ask(prompt(100), "long", max_tokens=2)
    engine.until(lambda: engine.is_clean)
    assert [1, 32] in steps and all(sum(sizes) <= 32 + 1 for sizes in steps)


def test_a_sequence_ends_with_the_model_length(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=4)
    engine.ask(prompt(60), max_tokens=50)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(60), 4)
    assert engine.reason() == "length"


def test_an_end_token_ends_it_and_is_reported(engine: Rig) -> None:
    full = engine.oracle(prompt(20), 20)
    engine.ask(prompt(20), max_tokens=20, stop_token_ids=(full[6],))
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == full[: full.index(full[6]) + 1]
    assert engine.reason() == "stop"


def test_min_tokens_keep_the_end_token_away(engine: Rig) -> None:
    params = {"stop_token_ids": tuple(engine.oracle(prompt(20), 1)), "min_tokens": 5}
    engine.ask(prompt(20), max_tokens=12, **params)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20), 12, **params)
    assert len(engine.tokens()) >= 5


def test_a_resumed_request_goes_on_where_it_was(engine: Rig) -> None:
    params = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5}
    full = engine.oracle(prompt(20), 12, **params)
    engine.ask(prompt(20) + full[:5], num_output=5, max_tokens=12, **params)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas()[0].index == 5
    assert engine.tokens() == full[5:]


def test_logprobs_come_with_every_token(engine: Rig) -> None:
    engine.ask(prompt(20), logprobs=2)
    engine.until(lambda: engine.is_clean)
    for delta in engine.deltas():
        assert [entry.top[0][0] for entry in delta.logprobs] == list(delta.token_ids)


def test_the_next_turn_reuses_prompt_and_answer(engine: Rig) -> None:
    first = prompt(30)
    engine.ask(first, max_tokens=20)
    engine.until(lambda: engine.is_clean)
    second = first + engine.tokens() + prompt(5, 1)
    engine.ask(second, "b")
    engine.until(lambda: engine.is_clean)
    assert engine.deltas("b")[0].num_cached_tokens == 48  # of 49 tokens with KV
    assert engine.tokens("b") == engine.oracle(second)


def test_a_reset_cache_is_computed_anew(engine: Rig) -> None:
    for name in "ab":
        engine.ask(prompt(40), name)
        engine.until(lambda: engine.is_clean)
        engine.tell(ResetPrefixCache(request_id="x"))
    assert engine.deltas("b")[0].num_cached_tokens == 0


def test_each_step_is_one_message_to_each_router(engine: Rig) -> None:
    for name, router in (("a", b"r1"), ("b", b"r1"), ("c", b"r2")):
        engine.ask(prompt(4), name, router=router)
    engine.turn(1)
    assert sorted((router, len(message.outputs)) for router, message in engine.sent) == [(b"r1", 2), (b"r2", 1)]


# ---------------------------------------------------------------- attempts and ids


def test_a_new_attempt_of_a_running_request_repeats_its_tokens(engine: Rig) -> None:
    engine.ask(prompt(20), max_tokens=12)
    engine.until(lambda: len(engine.tokens()) >= 4)
    engine.ask(prompt(20), attempt=1, max_tokens=12)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(20), 12)
    assert engine.deltas(attempt=1)[0].index == 0


def test_a_new_attempt_with_another_prompt_starts_over(engine: Rig) -> None:
    engine.ask(prompt(20), max_tokens=50)
    engine.turn(3)
    engine.ask(prompt(25, 1), attempt=1)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(25, 1))


def test_a_new_attempt_with_other_parameters_starts_over(engine: Rig) -> None:
    engine.ask(prompt(20), max_tokens=50)
    engine.turn(3)
    engine.ask(prompt(20), attempt=1, max_tokens=5)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(20), 5)


def test_a_duplicate_is_ignored(engine: Rig) -> None:
    for _ in range(3):
        engine.ask(prompt(20))
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20))


def test_another_routers_request_id_is_refused(engine: Rig) -> None:
    engine.ask(prompt(20))
    engine.ask(prompt(20, 1), router=b"stranger", attempt=5)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20))
    assert [router for router, message in engine.sent if message in engine.failures()] == [b"stranger"]


# ---------------------------------------------------------------- ends of all kinds


@pytest.mark.parametrize("num_turns", [0, 1, 9], ids=["waiting", "prefilling", "decoding"])
def test_an_abort_releases_everything_at_once(engine: Rig, num_turns: int) -> None:
    engine.ask(prompt(100), max_tokens=100)
    engine.turn(num_turns)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.turn()
    assert engine.is_clean and not engine.failures()


@pytest.mark.parametrize(("attempt", "router"), [(1, b"router"), (2, b"stranger")])
def test_old_and_foreign_aborts_are_ignored(engine: Rig, attempt: int, router: bytes) -> None:
    engine.ask(prompt(20), attempt=2)
    engine.tell(AbortRequest(request_id="a", attempt=attempt), router)
    engine.until(lambda: engine.is_clean)
    assert engine.reason(attempt=2) == "length"


def test_a_lost_router_takes_its_requests_along(engine: Rig) -> None:
    engine.ask(prompt(40), "mine", router=b"lost", max_tokens=100)
    engine.ask(prompt(40), "other")
    engine.turn(5)
    engine.engine.notify(RouterLost(b"lost"))
    engine.until(lambda: engine.is_clean)
    assert engine.reason("other") == "length" and not engine.reason("mine")


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([], {}, "empty"),
        ([1, 2, 261], {}, "token id 261 is outside of the vocabulary of 261"),
        ([1] * 512, {}, "512 tokens, the maximum is 511"),
        ([1] * 3, {"prompt": b"12345"}, "5 bytes"),
        ([1] * 3, {"num_output": 3}, "invalid num_output_tokens 3 of 3"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_poison_fails_alone(engine: Rig, tokens: list[int], options: dict[str, Any], reason: str, remote: bool) -> None:
    engine.ask(prompt(20), "good")
    engine.ask(tokens, "bad", remote=remote, **options)
    engine.until(lambda: engine.is_clean)
    assert engine.reason("good") == "length"
    (failed,) = engine.failures("bad")
    assert reason in failed.message and (failed.phase, failed.retryable) == ("queue", False)


def test_odd_parameters_harm_nobody(engine: Rig) -> None:
    bias = ((2**40, 5.0), (-3, 5.0), (7, float("inf")), (8, float("nan")))
    for number, temperature in enumerate((0.0, 1.0)):
        odd: dict[str, Any] = {"logit_bias": bias, "temperature": temperature, "stop_token_ids": (2**40, -1)}
        engine.ask(prompt(20), f"odd{number}", min_tokens=3, **odd)
    engine.ask(prompt(20), "good")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("good") == engine.oracle(prompt(20))
    assert "not finite" in engine.failures("odd1")[0].message


def test_what_a_decode_worker_does_not_do_is_refused(engine: Rig) -> None:
    engine.tell(PrefillRequest(request_id="a", attempt=0, prompt=b"1234", params=SamplingParams(max_tokens=1)))
    engine.tell(RouterHeartbeat(router_id="r"))
    engine.turn()
    assert "does not accept PrefillRequest" in engine.failures()[0].message and len(engine.sent) == 1


def test_a_full_queue_is_refused_for_another_worker_to_take(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(max_waiting=1, max_num_seqs=1)
    for name in "abc":
        engine.ask(prompt(20), name)
    engine.turn()
    assert [(f.phase, f.retryable) for f in engine.failures("c")] == [("queue", True)]
    engine.until(lambda: engine.is_clean)


def test_a_step_that_raises_fails_its_requests_only(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._runner, "forward", lambda chunks: 1 / 0)
        engine.ask(prompt(40), "bad")
        engine.turn()
    (failed,) = engine.failures("bad")
    assert failed.retryable and "ZeroDivisionError" in failed.message
    engine.ask(prompt(40), "good")
    engine.until(lambda: engine.is_clean)
    assert engine.reason("good") == "length"


def test_steps_that_only_raise_end_the_engine(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine._runner, "forward", lambda chunks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for number in range(MAX_FAILED_STEPS):
            engine.ask(prompt(4), f"r{number}")
            engine.turn()


def test_a_device_that_failed_ends_the_engine_at_once(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    check_device_loss(engine, engine.engine._runner, monkeypatch)


@pytest.mark.parametrize(("num_turns", "phase"), [(1, "prefill"), (9, "decode")])
def test_a_deadline_names_its_phase(engine: Rig, num_turns: int, phase: str) -> None:
    engine.ask(prompt(100), max_tokens=100)
    engine.turn(num_turns)
    engine.later(601)
    assert [(f.phase, f.retryable) for f in engine.failures()] == [(phase, False)]
    assert engine.is_clean


def test_a_flood_of_commands_does_not_keep_the_loop_from_its_steps(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = engine.engine.apply

    def flooding(command: object) -> None:
        engine.tell(AbortRequest(request_id="nobody", attempt=0))
        apply(command)

    monkeypatch.setattr(engine.engine, "apply", flooding)
    engine.ask(prompt(20))
    engine.until(lambda: engine.reason())


def test_a_dead_receiver_ends_the_engine(engine: Rig) -> None:
    engine.receiver.failure = OSError("gone")
    with pytest.raises(RuntimeError, match="KV receiver thread has died"):
        engine.turn()


def test_the_loop_runs_in_its_own_thread_until_stopped(engine: Rig) -> None:
    engine.engine.start()
    engine.ask(prompt(100))
    engine.wait(engine.reason)
    assert engine.engine.stop() and not engine.engine.alive
    assert engine.engine.failure is None


@pytest.mark.parametrize(("phase", "reported"), [("", ("transfer", True)), ("grammar", ("grammar", False))])
def test_a_transfer_that_fails_for_good_is_reported_so(engine: Rig, phase: str, reported: tuple[str, bool]) -> None:
    engine.ask(prompt(40), remote=True)
    engine.turn()
    engine.engine.notify(TransferFailed("a", 0, "no token fits", by_peer=False, phase=phase))
    engine.until(lambda: engine.is_clean)
    assert [(failed.phase, failed.retryable) for failed in engine.failures()] == [reported]
