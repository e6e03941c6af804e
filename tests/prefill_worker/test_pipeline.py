"""The engine over a device that runs steps as late as it can (`lazy_launcher.py`), and what the pipeline measures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.blocks.block_hash import block_hashes
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import AbortRequest, KVBlocks, KVDone, PromptLogprobs, ResetPrefixCache
from prefill_worker import engine as prefill_engine
from prefill_worker.launcher import ChunkOutput
from prefill_worker.pipeline import LEAD_S, LEAD_SHARE, LOOK_S, PromptPipeline
from prefill_worker.scheduler import PrefillChunk

from ..engine_rig import prompt
from .test_scheduler import MODEL, scheduler
from .test_scheduler import prompt as sequence_of

Rig = Any  # EngineRig of conftest, which test modules cannot import


@pytest.fixture
def ahead(make_engine: Callable[..., Rig]) -> Rig:
    return make_engine(ahead=True)


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_first_tokens_equal_the_oracle(ahead: Rig, params: dict[str, object]) -> None:
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 31, 33, 100, 64)}
    for name, tokens in prompts.items():
        ahead.ask(tokens, name, **params)
    ahead.until(lambda: ahead.is_clean)
    for name, tokens in prompts.items():
        (delta,) = ahead.deltas(name)
        assert (list(delta.token_ids), delta.finish_reason) == (ahead.oracle(tokens, **params), "length")
    assert ahead.device.num_ahead > 5


def test_each_step_is_launched_before_the_outputs_of_the_one_before_are_processed(ahead: Rig) -> None:
    ahead.ask(prompt(100))
    ahead.until(lambda: ahead.is_clean)
    launched, read = "launched", "read"
    assert ahead.device.events == [
        (launched, 0), (launched, 1), (read, 0), (launched, 2), (read, 1), (launched, 3), (read, 2), (read, 3)
    ]  # fmt: skip
    assert list(ahead.deltas()[0].token_ids) == ahead.oracle(prompt(100))


def test_a_device_that_computes_in_the_call_has_nothing_in_flight_between_turns(
    make_engine: Callable[..., Rig],
) -> None:
    engine = make_engine()
    engine.ask(prompt(100))
    while not engine.deltas():
        engine.turn()
        assert engine.engine._pipeline.in_flight is None


def test_logprobs_of_a_prompt_equal_those_of_steps_that_wait(make_engine: Callable[..., Rig]) -> None:
    found = []
    for ahead in (True, False):
        engine = make_engine(ahead=ahead)
        engine.ask(prompt(70), prompt_logprobs=2, logprobs=3)
        engine.until(lambda engine=engine: engine.is_clean)
        logprobs = [message for _, message in engine.sent if isinstance(message, PromptLogprobs)]
        found.append((logprobs, engine.deltas()[0].token_ids, engine.deltas()[0].logprobs))
    assert found[0] == found[1] and [message.start for message in found[0][0]] == [1, 33, 65]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_equal_those_of_steps_that_wait(make_pooling_engine: Callable[..., Rig], pooling: str) -> None:
    found = []
    for ahead in (True, False):
        engine = make_pooling_engine(pooling, ahead=ahead)
        for length in (100, 40, 7):
            engine.ask(prompt(length), f"r{length}", pooling=pooling)
        engine.until(lambda engine=engine: engine.is_clean)
        found.append({m.request_id: m.values for _, m in engine.sent if hasattr(m, "values")})
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_prefix_that_the_step_in_flight_computes_is_shared(ahead: Rig) -> None:
    tokens = prompt(32)
    ahead.ask([*tokens, 1], "a")
    ahead.turn()
    ahead.ask([*tokens, 2], "b")
    ahead.until(lambda: ahead.is_clean)
    assert [ahead.deltas(name)[0].num_cached_tokens for name in "ab"] == [0, 32]
    for name, last in (("a", 1), ("b", 2)):
        assert list(ahead.deltas(name)[0].token_ids) == ahead.oracle([*tokens, last])


def test_blocks_are_shipped_once_their_step_has_ended(ahead: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    progress = ahead.engine._sender.progress

    def recorded(name: str, attempt: int, num_ready: int, *rest: object) -> None:
        told.append((num_ready, sum(kind == "read" for kind, _ in ahead.device.events)))
        progress(name, attempt, num_ready, *rest)

    monkeypatch.setattr(ahead.engine._sender, "progress", recorded)
    tokens = prompt(100)
    ahead.ask(tokens, remote=True)
    ahead.until(lambda: ahead.deltas())
    assert told == [(2, 1), (4, 2), (6, 3), (7, 4)], "two blocks a step, seven in all"
    ahead.read_open()
    ahead.grant()
    shipped: list[bytes] = []
    while len(shipped) < 7:
        message, frames = ahead.read()
        assert isinstance(message, KVBlocks)
        shipped += frames
    assert shipped[:6] == ahead.kv_of(tokens)[:6]
    assert isinstance(ahead.read()[0], KVDone)
    ahead.ack()
    ahead.until(lambda: ahead.is_clean)


# ---------------------------------------------------------------- ends while steps are in flight


def test_blocks_of_an_aborted_prompt_linger_until_its_last_step_has_ended(ahead: Rig) -> None:
    ahead.ask(prompt(200), remote=True)
    ahead.turn(2)
    scheduler = ahead.engine.scheduler
    ahead.tell(AbortRequest(request_id="a", attempt=0))
    ahead.engine._take_commands()
    assert len(scheduler) == 0 and not ahead.engine.is_empty and ahead.engine.has_work
    assert scheduler.check_integrity().owned == 13
    ahead.turn()
    assert ahead.is_clean and not ahead.deltas() and not ahead.failures()


def test_an_aborted_prompt_leaves_the_others_alone(make_engine: Callable[..., Rig]) -> None:
    rng, engine = random.Random(1), make_engine(ahead=True, num_blocks=24)
    lengths = {f"r{number}": rng.randrange(1, 150) for number in range(40)}
    aborted = set(rng.sample(sorted(lengths), 15))
    for number, (name, length) in enumerate(lengths.items()):
        engine.ask(prompt(length, number), name, remote=name in aborted)
        engine.turn(rng.randrange(3))
        if name in aborted:
            engine.tell(AbortRequest(request_id=name, attempt=0))
    engine.until(lambda: engine.is_clean)
    for number, (name, length) in enumerate(lengths.items()):
        if name not in aborted:
            assert list(engine.deltas(name)[0].token_ids) == engine.oracle(prompt(length, number)), name
    assert engine.device.num_ahead > 20


def test_another_attempt_while_the_first_is_in_flight(ahead: Rig) -> None:
    ahead.ask(prompt(100))
    ahead.turn(2)
    ahead.ask(prompt(100), attempt=1)
    ahead.until(lambda: ahead.is_clean)
    (delta,) = ahead.deltas()
    assert delta.attempt == 1 and list(delta.token_ids) == ahead.oracle(prompt(100))


def test_a_step_that_fails_fails_the_prompts_of_the_step_behind_it(ahead: Rig) -> None:
    ahead.device.fail_at = 1
    tokens = prompt(100)
    ahead.ask(tokens, "a", remote=True)  # in steps 0 to 3
    ahead.turn()
    ahead.ask(prompt(20, 1), "b")  # in the step behind that which fails, with the rest of the other
    ahead.until(lambda: ahead.failures())
    for name in "ab":
        assert [(f.phase, f.retryable) for f in ahead.failures(name)] == [("prefill", True)]
        assert "the device failed" in ahead.failures(name)[0].message
    ahead.until(lambda: ahead.is_clean)
    assert len(ahead.engine.scheduler.pool.match(block_hashes(tokens, 16))) == 2, "those of the step before"
    ahead.ask(tokens, "c")
    ahead.until(lambda: ahead.is_clean)
    assert list(ahead.deltas("c")[0].token_ids) == ahead.oracle(tokens)
    assert ahead.deltas("c")[0].num_cached_tokens == 32


def test_a_step_that_cannot_be_launched_leaves_the_one_in_flight_alone(ahead: Rig) -> None:
    ahead.device.refuse_at = 1
    ahead.ask(prompt(20), "a")
    ahead.turn()
    ahead.ask(prompt(100, 1), "b", remote=True)
    ahead.until(lambda: ahead.is_clean)
    assert not ahead.failures("a") and list(ahead.deltas("a")[0].token_ids) == ahead.oracle(prompt(20))
    assert [(f.phase, f.retryable) for f in ahead.failures("b")] == [("prefill", True)]


def test_an_engine_that_ends_waits_for_the_step_in_flight(ahead: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    ahead.ask(prompt(100))
    ahead.turn()
    with monkeypatch.context() as patched:
        patched.setattr(ahead.device, "close", lambda: ended.append("steps"))
        patched.setattr(ahead.engine._sender, "stop", lambda: ended.append("sender"))
        ahead.engine.close()
    assert ended == ["steps", "sender"]


def test_a_reset_cache_is_computed_anew_while_a_step_is_in_flight(ahead: Rig) -> None:
    ahead.ask(prompt(70))
    ahead.turn()
    ahead.tell(ResetPrefixCache(request_id="x"))
    ahead.until(lambda: ahead.is_clean)
    assert list(ahead.deltas()[0].token_ids) == ahead.oracle(prompt(70))


# ---------------------------------------------------------------- times


class Timed:
    """A device whose steps end when the test says so."""

    runs_ahead = True

    def __init__(self) -> None:
        self.is_done = False

    def launch(self, chunks: Sequence[object], rows: object) -> Timed:
        self.num_chunks = len(chunks)
        return self

    def read(self) -> Sequence[ChunkOutput]:
        return [ChunkOutput()] * self.num_chunks


def launch(pipeline: PromptPipeline, chunks: Sequence[PrefillChunk], now: float) -> None:
    pipeline.launch(chunks, StepShape.sum(chunk.shape for chunk in chunks), (), now)


def test_a_step_takes_the_time_between_two_ends() -> None:
    plan, device = scheduler(budget=8), Timed()
    pipeline = PromptPipeline(plan, device)  # type: ignore[arg-type]
    plan.add(sequence_of("a", list(range(40))))
    ends = iter((11.0, 11.8, 14.0))
    taken = []
    for launched_at in (10.0, 10.9, 13.5):  # the second behind the first, the third when the device stands still
        before = pipeline.in_flight
        if launched_at == 13.5 and before is not None:
            taken.append(pipeline.complete(before, lambda: next(ends))[2])
            before = None
        launch(pipeline, plan.schedule(launched_at, MODEL).chunks, launched_at)
        if before is not None:
            taken.append(pipeline.complete(before, lambda: next(ends))[2])
    assert pipeline.in_flight is not None
    taken.append(pipeline.complete(pipeline.in_flight, lambda: next(ends))[2])
    assert taken == pytest.approx([1.0, 0.8, 0.5])


@pytest.mark.parametrize("token_s", [0.1, 0.01])
def test_a_step_is_launched_shortly_before_the_one_in_flight_ends(token_s: float) -> None:
    plan, device, model = scheduler(budget=8), Timed(), StepModel(token_s=token_s, num_steps=9)
    pipeline = PromptPipeline(plan, device)  # type: ignore[arg-type]
    assert pipeline.hold_s(10.0, model) == 0.0
    plan.add(sequence_of("a", list(range(40))))
    launch(pipeline, plan.schedule(10.0, model).chunks, 10.0)
    lead_s = max(LEAD_S, LEAD_SHARE * 8 * token_s)
    assert pipeline.hold_s(10.0, StepModel()) == 0.0, "nothing is known of steps"
    assert pipeline.hold_s(10.0, model) == LOOK_S
    assert pipeline.hold_s(10.0 + 8 * token_s - lead_s - 0.001, model) == pytest.approx(0.001)
    assert pipeline.hold_s(10.0 + 8 * token_s - lead_s, model) <= 1e-9
    assert pipeline.elapsed_s(10.02, model) == pytest.approx(0.02)
    assert pipeline.elapsed_s(99.0, model) == pytest.approx(8 * token_s)
    device.is_done = True
    assert pipeline.hold_s(10.0, model) == 0.0, "it has ended earlier"


def test_what_waits_is_less_by_the_part_of_the_step_in_flight_that_is_over(
    ahead: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.ask(prompt(100))
    ahead.turn()
    now = time.monotonic()
    monkeypatch.setattr(prefill_engine, "time", SimpleNamespace(monotonic=lambda: now))
    step = ahead.engine._pipeline.in_flight
    ahead.engine._pipeline.in_flight = type(step)(step.chunks, step.shape, step.launched, now)
    for _ in range(8):  # the fit of steps of 32 tokens that take a second
        ahead.engine.took(step.shape, 1.0)
    waiting_s = ahead.engine.snapshot().waiting_s
    assert waiting_s > 1.0 and ahead.engine.snapshot().num_waiting_tokens == 100
    ahead.engine._pipeline.in_flight = type(step)(step.chunks, step.shape, step.launched, now - 0.5)
    assert ahead.engine.snapshot().waiting_s == pytest.approx(waiting_s - 0.5)
