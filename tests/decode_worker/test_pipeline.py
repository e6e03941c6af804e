"""The engine over a device that runs steps as late as it can (`lazy_device.py`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.blocks.block_hash import block_hashes
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.worker import loop
from common.wire.messages import AbortRequest, KVGrant
from common.wire.sampling_params import BadWord
from decode_worker import engine as decode_engine

from .lazy_device import LazyDevice

Rig = Any  # EngineRig of conftest, which test modules cannot import


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture
def ahead(make_engine: Callable[..., Rig]) -> Callable[..., Rig]:
    """Engines that launch ahead; the device is `rig.device`."""

    def make(**options: float) -> Rig:
        devices: list[LazyDevice] = []

        def launcher(runner: ModelRunner, sampler: Sampler) -> LazyDevice:
            devices.append(LazyDevice(runner, sampler))
            return devices[-1]

        rig = make_engine(launcher=launcher, **options)
        rig.device = devices[0]
        return rig

    return make


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_tokens_equal_the_oracle(ahead: Callable[..., Rig], params: dict[str, object]) -> None:
    engine = ahead()
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 40, 70)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=20, **params)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 20, **params)
        assert engine.reason(name) == "length"
    assert engine.device.num_fed > 6 * 10
    assert engine.device.num_launched <= 30  # a sequence whose length is up is not run once more


@pytest.mark.slow
def test_a_stop_token_is_seen_one_step_late_and_nothing_follows_it(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    full = engine.oracle(prompt(20), 20)
    engine.ask(prompt(20), max_tokens=20, stop_token_ids=(full[6],))
    engine.ask(prompt(33, 1), "b", max_tokens=20)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == full[: full.index(full[6]) + 1]
    assert engine.tokens("b") == engine.oracle(prompt(33, 1), 20)


@pytest.mark.slow
def test_a_step_that_fails_publishes_nothing_it_was_to_write(ahead: Callable[..., Rig]) -> None:
    engine, tokens = ahead(), prompt(20)
    full = engine.oracle(tokens, 50)
    engine.ask(tokens, max_tokens=50)
    engine.device.fail_at = 12  # it runs position 31, the last slot of the second block
    engine.until(lambda: engine.is_clean)
    assert "the device failed" in engine.failures()[0].message
    assert len(engine.engine.scheduler.pool.match(block_hashes(tokens + full, 16))) == 1
    for count in (12, 13, 28, 40):  # a stream that goes on here, another choice, the next turn of a conversation
        engine.ask(tokens + full[:count], f"x{count}", num_output=count, max_tokens=50)
        engine.until(lambda: engine.is_clean)
        assert full[:count] + engine.tokens(f"x{count}") == full


def test_a_device_that_fails_at_the_end_leaves_no_thread(
    ahead: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ended = ahead(), []
    ends = [engine.engine._transfers.incoming, engine.engine._transfers.outgoing]

    def close() -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(engine.device, "close", close)
        for owner in ends:
            broken.setattr(type(owner), "stop", lambda owner: ended.append(owner))
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.engine.close()
    assert ended == ends


def test_blocks_of_a_finished_sequence_linger_until_its_last_step_ended(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    scheduler = engine.engine.scheduler
    full = engine.oracle(prompt(20), 20)
    engine.ask(prompt(20), max_tokens=20, stop_token_ids=(full[6],))
    engine.until(lambda: engine.reason() == "stop")
    assert len(scheduler) == 0 and engine.engine.has_work and not engine.engine.is_empty
    assert scheduler.check_integrity().owned == 2
    engine.turn()
    assert engine.is_clean and engine.device.num_run == engine.device.num_launched


@pytest.mark.slow
def test_an_aborted_sequence_leaves_the_others_alone(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    engine.ask(prompt(20), max_tokens=200)
    engine.ask(prompt(30, 1), "b", max_tokens=30)
    engine.until(lambda: len(engine.tokens("b")) > 5)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.turn()
    assert engine.engine.scheduler.find("a") is None
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(prompt(30, 1), 30)
    assert engine.tokens() == engine.oracle(prompt(20), len(engine.tokens()))


def test_an_aborted_request_comes_back_under_its_name(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    engine.ask(prompt(20), max_tokens=200)
    engine.until(lambda: len(engine.tokens()) > 5)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.ask(prompt(25, 2), attempt=1, max_tokens=10)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(25, 2), 10)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [8, 10, 12])
def test_preempted_sequences_give_the_same_tokens(ahead: Callable[..., Rig], num_blocks: int) -> None:
    engine = ahead(num_blocks=num_blocks, chunk=24)
    prompts = {f"r{seed}": prompt(20, seed) for seed in range(4)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=60)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 60)
    assert any(engine.deltas(name)[-1].timeline.num_preemptions for name in prompts)
    assert engine.device.num_fed


@pytest.mark.slow
def test_a_transfer_gets_no_block_that_a_step_in_flight_writes_to(ahead: Callable[..., Rig]) -> None:
    """A prompt waits for the blocks of a request that is aborted while a step of it has not run yet."""
    engine = ahead(num_blocks=5)
    engine.ask(prompt(14), max_tokens=200)
    engine.until(lambda: engine.tokens())
    tokens = prompt(70, 1)
    engine.ask(tokens, "b", remote=True, max_tokens=5)
    engine.compute(tokens)
    engine.peer.open("b", 5)
    engine.gently(lambda: engine.engine.scheduler.queue)  # while the other one still runs
    steps_before_grant: list[int] = []

    def granted() -> bool:
        """What the prefill worker hears while the engine waits for a step."""
        if not steps_before_grant and engine.peer.socket.poll(100) and isinstance(engine.peer.read(), KVGrant):
            steps_before_grant.append(engine.device.num_launched - engine.device.num_run)
        return bool(steps_before_grant)

    engine.device.on_run = granted
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.until(granted)
    assert steps_before_grant == [0]
    engine.ship(tokens, 0, "b")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(tokens, 5)


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.2, "temperature": 0.7, "seed": 1},
    "logprobs": {"logprobs": 2},
    "bias": {"logit_bias": ((65, 4.0), (66, -9.0)), "min_tokens": 30, "temperature": 1.0, "seed": 5},
    "grammar": {"grammar": "start: /[a-z]{26}[0-9]{9}/", "temperature": 1.0, "seed": 7},
    "bad_words": {"bad_words": (BadWord.of([66]), BadWord.of([67, 68])), "temperature": 1.5, "seed": 3},
}


def test_rows_of_every_kind_are_launched_ahead(ahead: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prompts wait for the step in flight. A row that depends on that step's token is sampled when it is known."""
    engine = ahead(grammars=True, num_blocks=64)
    computed: list[int] = []
    compute = engine.engine._compute
    monkeypatch.setattr(
        engine.engine,
        "_compute",
        lambda chunks, now: (computed.append(max((c.num_tokens for c in chunks), default=2)), compute(chunks, now)),
    )
    for number, (name, params) in enumerate(KINDS.items()):
        engine.ask(prompt(20 + number, number), name, max_tokens=30, **params)
        engine.turn(3)
    engine.until(lambda: engine.is_clean)
    for number, (name, params) in enumerate(KINDS.items()):
        assert engine.tokens(name) == engine.oracle(prompt(20 + number, number), 30, **params), name
    assert all(len(entry.logprobs) == len(entry.token_ids) for entry in engine.deltas("logprobs"))
    assert min(computed) > 1 and len(computed) < 12
    assert engine.device.num_late > 20 and engine.device.num_fed > 100


def test_rows_that_depend_on_no_token_are_not_kept_waiting(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    for number, name in enumerate(("plain", "logprobs", "bias")):
        engine.ask(prompt(20 + number, number), name, max_tokens=20, **KINDS[name])
    engine.until(lambda: engine.is_clean)
    assert engine.device.num_fed > 30 and not engine.device.num_late


def test_a_step_that_fails_before_the_next_one_is_sampled_ends_both(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    engine.ask(prompt(20), max_tokens=50, **KINDS["penalties"])
    engine.ask(prompt(30, 1), "b", max_tokens=50)
    engine.until(lambda: len(engine.tokens()) > 4)
    engine.device.fail_at = engine.device.num_run + 1
    engine.until(lambda: engine.is_clean)
    assert [len(engine.failures(name)) for name in "ab"] == [1, 1]
    engine.ask(prompt(20), "c", **KINDS["penalties"])
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("c") == engine.oracle(prompt(20), **KINDS["penalties"])


def test_a_step_that_cannot_be_sampled_costs_no_token_of_the_step_before(
    ahead: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of `b` is in flight when sampling the next step, which only has `a`, fails."""
    engine, failed = ahead(), []
    engine.ask(prompt(20), max_tokens=50)
    engine.ask(prompt(30, 1), "b", max_tokens=10)
    engine.until(lambda: len(engine.tokens("b")) > 4)
    prepare = engine.device.sampler.prepare

    def failing_once(rows: Sequence[object]) -> Any:
        if len(rows) == 1 and not failed:
            failed.append(rows)
            raise RuntimeError("out of memory")
        return prepare(rows)

    monkeypatch.setattr(engine.device.sampler, "prepare", failing_once)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(prompt(30, 1), 10)
    assert [len(engine.failures(name)) for name in "ab"] == [1, 0]


@pytest.mark.slow
def test_a_stop_token_ends_a_row_of_the_step_that_is_not_sampled_yet(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    params = KINDS["penalties"]
    full = engine.oracle(prompt(20), 20, **params)
    engine.ask(prompt(20), max_tokens=20, stop_token_ids=(full[6],), **params)
    engine.ask(prompt(33, 1), "b", max_tokens=20, **params)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == full[: full.index(full[6]) + 1]
    assert engine.tokens("b") == engine.oracle(prompt(33, 1), 20, **params)


def test_a_new_attempt_hears_every_token_again(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    engine.ask(prompt(20), max_tokens=30)
    engine.until(lambda: len(engine.tokens()) > 5)
    engine.ask(prompt(20), attempt=1, max_tokens=30)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens(attempt=1) == engine.oracle(prompt(20), 30)


@pytest.mark.parametrize("when", ["fail_at", "refuse_at"])
def test_a_failed_step_ends_its_requests_once_and_leaks_nothing(ahead: Callable[..., Rig], when: str) -> None:
    engine = ahead()
    engine.ask(prompt(20), max_tokens=50)
    engine.ask(prompt(30, 1), "b", max_tokens=50)
    engine.until(lambda: len(engine.tokens()) > 4)
    setattr(engine.device, when, engine.device.num_launched + 2)
    engine.until(lambda: engine.is_clean)
    assert [len(engine.failures(name)) for name in "ab"] == [1, 1]
    assert engine.failures()[0].retryable
    engine.ask(prompt(20), "c")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("c") == engine.oracle(prompt(20))


def test_any_mixture_of_arrivals_and_ends(ahead: Callable[..., Rig]) -> None:
    engine = ahead(num_blocks=24, max_num_seqs=5, chunk=20)
    engine.mix(seed=5)
    assert engine.device.num_fed > 50


def test_a_step_with_prompts_is_not_charged_for_the_step_in_flight_before_it(
    ahead: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would teach the worker that prompts are dear. The tokens of the other step leave before it begins."""
    engine, observed, jumps = ahead(), list[tuple[bool, float]](), [0.0]
    observe = engine.engine.step_fit.observe
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumps[0])
    for module in (decode_engine, loop):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        engine.engine.step_fit,
        "observe",
        lambda shape, step_s: (observed.append((shape.num_tokens > 0, step_s)), observe(shape, step_s)),
    )
    engine.ask(prompt(20), max_tokens=40)
    engine.until(lambda: len(engine.tokens()) > 5)

    def jump() -> None:
        jumps[0] += 20.0

    engine.device.on_run = jump
    known = len(engine.tokens())
    compute = engine.engine._compute
    seen: list[int] = []
    monkeypatch.setattr(
        engine.engine, "_compute", lambda *step: (seen.append(len(engine.tokens()) - known), compute(*step))
    )
    del observed[:]
    engine.ask(prompt(40, 1), "b", max_tokens=2)
    engine.until(lambda: any(has_prompts for has_prompts, _ in observed))
    (mixed_s,) = (step_s for has_prompts, step_s in observed if has_prompts)
    assert jumps[0] and mixed_s < 20.0
    assert seen == [1]
