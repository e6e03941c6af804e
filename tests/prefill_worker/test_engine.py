"""The prefill engine over a tiny real model: the right first token, the right blocks, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.transfer.sender import TransferEnded
from common.engine.worker.contract import RouterLost
from common.engine.worker.loop import MAX_FAILED_STEPS
from common.errors import BlockError
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    KVBlocks,
    KVDone,
    KVFailed,
    KVOpen,
    ResetPrefixCache,
    RouterHeartbeat,
)
from common.wire.sampling_params import SamplingParams

from ..engine_rig import check_device_loss, prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import


def held(rig: Rig, length: int = 40, name: str = "a") -> None:
    """A prompt that is computed and waits for its decode worker."""
    rig.ask(prompt(length), name, remote=True)
    rig.until(lambda: rig.deltas(name))
    assert rig.engine.scheduler.held


# ---------------------------------------------------------------- first tokens


def test_first_tokens_equal_the_oracle_whatever_the_batch_and_chunks(engine: Rig) -> None:
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 31, 33, 100)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        (delta,) = engine.deltas(name)
        assert (delta.index, list(delta.token_ids), delta.finish_reason) == (0, engine.oracle(tokens), "length")


def test_first_tokens_equal_the_oracle_in_whatever_order_prompts_pass_each_other(engine: Rig) -> None:
    prompts = {f"r{length}": prompt(length, length) for length in (100, 70, 33, 16, 9, 90)}
    goals = (0.0, 0.001, 30.0, 0.0, 5.0, 60.0)
    for (name, tokens), ttft_s in zip(prompts.items(), goals, strict=True):
        engine.ask(tokens, name, ttft_s=ttft_s)
        engine.turn()
    engine.until(lambda: engine.is_clean)
    assert [engine.deltas(name)[0].token_ids[0] for name in prompts] == [engine.oracle(p)[0] for p in prompts.values()]


def test_a_short_prompt_comes_before_the_rest_of_a_long_one(engine: Rig) -> None:
    engine.ask(prompt(200), "long", ttft_s=60.0)
    engine.turn()
    engine.ask(prompt(20, 1), "short", ttft_s=60.0)
    engine.turn()
    assert engine.deltas("short") and not engine.deltas("long")
    engine.until(lambda: engine.is_clean)
    assert list(engine.deltas("long")[0].token_ids) == engine.oracle(prompt(200))


def test_a_cached_prefix_changes_nothing_but_the_count(engine: Rig) -> None:
    tokens = prompt(70)
    for name, cached in (("a", 0), ("b", 64)):
        engine.ask(tokens, name)
        engine.until(lambda: engine.is_clean)
        (delta,) = engine.deltas(name)
        assert (list(delta.token_ids), delta.num_cached_tokens) == (engine.oracle(tokens), cached)


def test_a_reset_cache_is_computed_anew(engine: Rig) -> None:
    engine.ask(prompt(70))
    engine.tell(ResetPrefixCache(request_id="x"))
    engine.until(lambda: engine.is_clean)
    engine.tell(ResetPrefixCache(request_id="x"))
    engine.ask(prompt(70), "b")
    engine.until(lambda: engine.deltas("b"))
    assert engine.deltas("b")[0].num_cached_tokens == 0


def test_a_long_prompt_takes_several_steps(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = engine.engine._launcher._runner.forward

    def recording(chunks: list[Any]) -> object:
        sizes.append(len(chunks[0].token_ids))
        return forward(chunks)

    monkeypatch.setattr(engine.engine._launcher._runner, "forward", recording)
    engine.ask(prompt(100))
    engine.until(lambda: engine.is_clean)
    assert sizes == [32, 32, 32, 4]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"frequency_penalty": 1.0}])
def test_a_resumed_request_goes_on_where_it_was(engine: Rig, params: dict[str, object]) -> None:
    tokens = prompt(20)
    full = engine.oracle(tokens, 6, **params)
    engine.ask(tokens + full[:4], num_output=4, max_tokens=6, **params)
    engine.until(lambda: engine.is_clean)
    (delta,) = engine.deltas()
    assert (delta.index, delta.token_ids) == (4, (full[4],))


def test_logprobs_come_with_the_token(engine: Rig) -> None:
    engine.ask(prompt(20), logprobs=3)
    engine.until(lambda: engine.is_clean)
    (delta,) = engine.deltas()
    assert delta.logprobs[0].top[0] == (delta.token_ids[0], delta.logprobs[0].logprob)
    assert len(delta.logprobs[0].top) == 3


def test_one_token_needs_no_decode_worker(engine: Rig) -> None:
    engine.ask(prompt(20), max_tokens=1)
    engine.turn(2)
    assert engine.deltas()[0].finish_reason == "length"
    assert engine.is_clean
    assert not engine.router.poll(0)


def test_the_first_token_may_be_the_end(engine: Rig) -> None:
    tokens = prompt(20)
    engine.ask(tokens, max_tokens=9, stop_token_ids=tuple(engine.oracle(tokens)))
    engine.until(lambda: engine.is_clean)
    assert engine.deltas()[0].finish_reason == "stop"


def test_a_banned_end_token_does_not_come_first(engine: Rig) -> None:
    tokens = prompt(20)
    stop = tuple(engine.oracle(tokens))
    engine.ask(tokens, stop_token_ids=stop, min_tokens=1)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas()[0].token_ids[0] not in stop


# ---------------------------------------------------------------- shipping


def test_ships_what_it_computed(engine: Rig) -> None:
    held(engine, 40)
    blocks = list(engine.engine.scheduler.held["a"].blocks)
    assert engine.read_open().num_blocks == 3
    engine.grant()
    header, frames = engine.read()
    assert isinstance(header, KVBlocks)
    assert frames == [bytes(engine.kv.block(block)) for block in blocks]
    done, _ = engine.read()
    assert isinstance(done, KVDone) and (done.first_token,) == engine.deltas()[0].token_ids
    engine.ack()
    engine.until(lambda: engine.is_clean)
    assert not engine.failures()


def test_the_announcement_goes_out_before_the_prompt_is_computed(engine: Rig) -> None:
    engine.ask(prompt(100), remote=True)
    engine.turn()
    assert isinstance(engine.read_open(), KVOpen) and not engine.deltas()
    engine.grant()
    shipped: list[int] = []
    while len(shipped) < 7:
        engine.turn()
        while engine.router.poll(20):
            message, frames = engine.read()
            shipped += range(message.first_block, message.first_block + len(frames)) if frames else []
        assert engine.deltas() or len(shipped) < 7
    assert shipped == list(range(7))
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.until(lambda: engine.is_clean)


def test_a_request_that_ends_at_once_is_not_a_failure_for_its_decode_worker(engine: Rig) -> None:
    tokens = prompt(20)
    engine.ask(tokens, remote=True, stop_token_ids=tuple(engine.oracle(tokens)))
    engine.until(lambda: engine.deltas())
    assert engine.deltas()[0].finish_reason == "stop"
    engine.read_open()
    engine.grant(first_block=2)
    assert isinstance(engine.read()[0], KVDone)
    engine.ack()
    engine.until(lambda: engine.is_clean)


def test_an_acknowledgement_stops_the_computing(engine: Rig) -> None:
    engine.ask(prompt(200), remote=True)
    engine.turn()
    engine.read_open()
    engine.ack()
    engine.gently(lambda: engine.is_clean)
    assert not engine.deltas() and not engine.failures()


@pytest.mark.slow
def test_no_acknowledgement_ends_with_the_lease(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(lease_s=0.5)  # far more than the prompt takes
    held(engine)
    engine.until(lambda: engine.is_clean)
    assert [(f.phase, f.retryable) for f in engine.failures()] == [("transfer", True)]


def test_the_end_of_an_earlier_life_takes_the_sender_along(engine: Rig) -> None:
    held(engine)
    engine.read_open()
    engine.engine.notify(TransferEnded("a", 0, "", 0, 0, 0.0, 0.0, 0.0))
    engine.until(lambda: engine.is_clean)
    assert engine.read_failed().reason == "acknowledged"  # nothing may be shipped from blocks that are released


def test_a_refusal_fails_the_request(engine: Rig) -> None:
    held(engine)
    engine.read_open()
    engine.reply(KVFailed(request_id="a", attempt=0, reason="layout differs"))
    engine.until(lambda: engine.is_clean)
    assert "layout differs" in engine.failures()[0].message


def test_held_blocks_make_others_wait_and_their_end_wakes_them(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(num_blocks=4)
    held(engine, 40)
    engine.ask(prompt(40, 1), "b")
    engine.turn(2)
    assert not engine.engine.has_work and not engine.deltas("b")
    engine.read_open()
    engine.ack()
    engine.until(lambda: engine.deltas("b"))


# ---------------------------------------------------------------- ends of all kinds


@pytest.mark.parametrize("num_turns", [0, 1, 9], ids=["waiting", "computing", "held"])
def test_an_abort_releases_everything_at_once(engine: Rig, num_turns: int) -> None:
    engine.ask(prompt(100), remote=True)
    engine.turn(num_turns)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.turn()
    assert engine.is_clean and not engine.failures()


def test_an_abort_tells_the_decode_worker(engine: Rig) -> None:
    held(engine)
    engine.read_open()  # before that there is nothing to take back
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.turn()
    assert engine.read_failed().reason == "aborted"


@pytest.mark.parametrize(("attempt", "router"), [(1, b"router"), (2, b"stranger")])
def test_old_and_foreign_aborts_are_ignored(engine: Rig, attempt: int, router: bytes) -> None:
    engine.ask(prompt(20), attempt=2)
    engine.tell(AbortRequest(request_id="a", attempt=attempt), router)
    engine.until(lambda: engine.deltas())


def test_a_lost_router_takes_its_requests_along(engine: Rig) -> None:
    engine.ask(prompt(40), "mine", remote=True, router=b"lost")
    engine.ask(prompt(40), "other")
    engine.engine.notify(RouterLost(b"lost"))
    engine.until(lambda: engine.is_clean)
    assert engine.deltas("other") and not engine.deltas("mine")


def test_a_duplicate_is_ignored(engine: Rig) -> None:
    for _ in range(3):
        engine.ask(prompt(40))
    engine.until(lambda: engine.is_clean)
    assert len(engine.deltas()) == 1 and not engine.failures()


def test_another_routers_request_id_is_refused(engine: Rig) -> None:
    engine.ask(prompt(40))
    engine.ask(prompt(40), router=b"stranger", attempt=5)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas()[0].attempt == 0
    assert [router for router, message in engine.sent if message in engine.failures()] == [b"stranger"]


def test_a_new_attempt_replaces_the_old_one(engine: Rig) -> None:
    held(engine)
    engine.read_open()
    engine.ask(prompt(40), attempt=1, remote=True)
    engine.until(lambda: len(engine.deltas()) == 2)
    assert engine.read_failed().attempt == 0
    assert engine.read_open().attempt == 1
    assert engine.deltas()[1].attempt == 1
    engine.tell(AbortRequest(request_id="a", attempt=1))
    engine.until(lambda: engine.is_clean)


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([], {}, "empty"),
        ([1, 2, 261], {}, "token id 261 is outside of the vocabulary of 261"),
        ([2**32 - 1], {}, "outside of the vocabulary"),
        ([1] * 513, {}, "513 tokens, the maximum is 512"),
        ([1] * 3, {"prompt": b"12345"}, "5 bytes"),
        ([1] * 3, {"num_output": 3}, "invalid num_output_tokens 3 of 3"),
        ([1] * 3, {"num_output": 2**62}, "invalid num_output_tokens"),
    ],
)
def test_poison_fails_alone(engine: Rig, tokens: list[int], options: dict[str, Any], reason: str) -> None:
    engine.ask(prompt(20), "good")
    engine.ask(tokens, "bad", **options)
    engine.until(lambda: engine.is_clean)
    assert engine.deltas("good") and not engine.failures("good")
    (failed,) = engine.failures("bad")
    assert reason in failed.message and (failed.phase, failed.retryable) == ("queue", False)


def test_logits_that_are_no_numbers_fail_alone(engine: Rig) -> None:
    engine.ask(prompt(20), "good", temperature=1.0)
    engine.ask(prompt(20), "bad", temperature=1.0, logit_bias=((7, float("nan")),))
    engine.until(lambda: engine.is_clean)
    assert engine.deltas("good") and not engine.deltas("bad")
    assert "not finite" in engine.failures("bad")[0].message


def test_what_a_prefill_worker_does_not_do_is_refused(engine: Rig) -> None:
    engine.tell(DecodeRequest(request_id="a", attempt=0, prompt=b"1234", params=SamplingParams(max_tokens=1)))
    engine.tell(RouterHeartbeat(router_id="r"))
    engine.turn()
    assert "does not accept DecodeRequest" in engine.failures()[0].message and len(engine.sent) == 1


def test_a_full_queue_is_refused_for_another_worker_to_take(make_engine: Callable[..., Rig]) -> None:
    engine = make_engine(max_waiting=2)
    for name in "abc":
        engine.ask(prompt(20), name)
    engine.turn()
    assert [(f.phase, f.retryable) for f in engine.failures("c")] == [("queue", True)]
    engine.until(lambda: engine.is_clean)


def test_a_step_that_raises_fails_its_requests_only(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._launcher._runner, "forward", lambda chunks: 1 / 0)
        engine.ask(prompt(40), "bad", remote=True)
        engine.turn()
    assert [(f.phase, f.retryable) for f in engine.failures("bad")] == [("prefill", True)]
    assert "ZeroDivisionError" in engine.failures("bad")[0].message
    engine.ask(prompt(40), "good")
    engine.until(lambda: engine.is_clean)
    assert engine.deltas("good")


def test_steps_that_only_raise_end_the_engine(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine._launcher._runner, "forward", lambda chunks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for number in range(MAX_FAILED_STEPS):
            engine.ask(prompt(4), f"r{number}")
            engine.turn()
    assert len(engine.sent) == MAX_FAILED_STEPS - 1  # the last turn's answer dies with the engine


def test_a_device_that_failed_ends_the_engine_at_once(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    check_device_loss(engine, engine.engine._launcher._runner, monkeypatch)


def test_broken_ownership_ends_the_engine(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.worker.loop.IDLE_CHECK_S", 0.0)
    engine.ask(prompt(20))
    engine.engine.scheduler.pool.allocate(1)
    with pytest.raises(BlockError, match="1 refs, 0 owners"):
        engine.turn(5)
    engine.engine.scheduler.pool.release([0])


@pytest.mark.parametrize(
    ("num_turns", "phase"), [(0, "queue"), (1, "prefill"), (9, "transfer")], ids=["waiting", "computing", "held"]
)
def test_a_deadline_names_its_phase(engine: Rig, num_turns: int, phase: str) -> None:
    engine.ask(prompt(100), remote=True, deadline_s=1000.0)
    if num_turns == 0:
        engine.engine.apply(engine.engine._inbox.get())
    engine.turn(num_turns)
    engine.engine.expire(engine.engine.scheduler.find("a").deadline + 1)
    engine.engine._flush()
    assert [(f.phase, f.retryable) for f in engine.failures()] == [(phase, False)]
    assert engine.is_clean


def test_a_dead_sender_ends_the_engine(engine: Rig) -> None:
    engine.engine._sender.failure = OSError("gone")
    with pytest.raises(RuntimeError, match="KV sender thread has died"):
        engine.turn()


def test_the_loop_runs_in_its_own_thread_until_stopped(engine: Rig) -> None:
    engine.engine.start()
    engine.ask(prompt(100))
    engine.wait(lambda: engine.deltas())
    assert engine.engine.alive and engine.engine.stop()
    assert not engine.engine.alive and engine.engine.failure is None
    assert threading.current_thread() is not engine.engine._thread


def test_the_decode_worker_learns_that_no_other_try_can_help(engine: Rig) -> None:
    engine.ask(prompt(100), remote=True, temperature=1.0, logit_bias=((7, float("nan")),))
    engine.turn()
    engine.read_open()
    engine.until(lambda: engine.is_clean)
    assert [(failed.phase, failed.retryable) for failed in engine.failures()] == [("prefill", False)]
    assert engine.read_failed().phase == "prefill"
