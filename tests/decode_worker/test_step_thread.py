"""The engine over a thread that runs its steps, as on CPUs: real steps, truly beside the engine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from common.engine.models.batch import ForwardBatch
from common.engine.run.runner import ModelRunner
from common.engine.run.step_launchers import StepThread
from common.engine.sampling.sampler import Sampler
from common.machine.cores import CoreShare
from common.wire.messages import AbortRequest

Rig = Any  # EngineRig of conftest, which test modules cannot import


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


class Steps(StepThread):
    """Counts its steps, and fails the one that it is told to."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        super().__init__(runner, sampler)
        self.num_launched = self.num_fed = self.num_run = self.fail_at = 0
        self.may_run = threading.Event()
        self.may_run.set()

    def launch(self, chunks: Any, sources: Any) -> Any:
        self.num_launched += 1
        self.num_fed += sum(source >= 0 for source in sources)
        return super().launch(chunks, sources)

    def _run(self, batch: ForwardBatch, *options: Any) -> Tensor:
        assert self.may_run.wait(30)
        self.num_run += 1
        if self.num_run == self.fail_at:
            raise RuntimeError("the step failed")
        return super()._run(batch, *options)


@pytest.fixture
def threaded(make_engine: Callable[..., Rig]) -> Iterator[Callable[..., Rig]]:
    """Engines whose steps run on a thread, `rig.steps`."""
    made: list[Steps] = []

    def make(**options: float) -> Rig:
        def launcher(runner: ModelRunner, sampler: Sampler) -> Steps:
            made.append(Steps(runner, sampler))
            return made[-1]

        rig = make_engine(launcher=launcher, **options)
        rig.steps = made[-1]
        return rig

    yield make
    for steps in made:
        steps.may_run.set()
        steps.close()


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_tokens_equal_the_oracle(threaded: Callable[..., Rig], params: dict[str, object]) -> None:
    engine = threaded()
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 40, 70)}
    for name, tokens in prompts.items():
        engine.ask(tokens, name, max_tokens=20, **params)
    engine.until(lambda: engine.is_clean)
    for name, tokens in prompts.items():
        assert engine.tokens(name) == engine.oracle(tokens, 20, **params)
    assert engine.steps.num_fed > 6 * 10


def test_the_engine_goes_on_while_a_step_runs(threaded: Callable[..., Rig]) -> None:
    """With nothing in flight a launch is all that a turn does: commands are taken before the step has run."""
    engine = threaded()
    engine.steps.may_run.clear()
    engine.ask(prompt(1), max_tokens=20)
    engine.turn()
    assert (engine.steps.num_launched, engine.steps.num_run) == (1, 0)
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.steps.may_run.set()
    engine.until(lambda: engine.is_clean)
    assert engine.steps.num_run == 1 and not engine.tokens()


class BesidePrompts(CoreShare):
    """Another worker computes prompts on the same cores for as long as `has_prompts` says so."""

    def __init__(self) -> None:
        super().__init__("", 2)
        self.has_prompts = True

    @property
    def has_prompts_elsewhere(self) -> bool:
        return self.has_prompts


@pytest.mark.slow
def test_steps_beside_prompts_keep_a_pace_and_change_no_token(threaded: Callable[..., Rig]) -> None:
    engine = threaded(slo_tpot_s=0.02)
    engine.engine.share_cores(BesidePrompts(), lambda num_threads: None)
    began = time.monotonic()
    for name in "ab":
        engine.ask(prompt(30, ord(name)), name, max_tokens=10)
    engine.until(lambda: engine.is_clean)
    assert time.monotonic() - began > 9 * 0.8 * 0.02
    for name in "ab":
        assert engine.tokens(name) == engine.oracle(prompt(30, ord(name)), 10)


def test_a_held_engine_sends_what_it_has_and_takes_commands(threaded: Callable[..., Rig]) -> None:
    engine = threaded(slo_tpot_s=1000.0)
    share = BesidePrompts()
    engine.engine.share_cores(share, lambda num_threads: None)
    engine.ask(prompt(30), max_tokens=50)
    engine.until(lambda: len(engine.tokens()) == 1)
    for _ in range(10):
        engine.turn()
    assert len(engine.tokens()) == 1, "the next step is not due for long"
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.until(lambda: engine.is_clean)
    engine.ask(prompt(30), "b", max_tokens=5)
    share.has_prompts = False
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(prompt(30), 5)


@pytest.mark.slow
def test_stops_penalties_and_preemption(threaded: Callable[..., Rig]) -> None:
    engine = threaded(num_blocks=10, chunk=24)
    full = engine.oracle(prompt(20), 40)
    penalty: dict[str, object] = {"presence_penalty": 1.5, "temperature": 0.7, "seed": 1}
    engine.ask(prompt(20), max_tokens=40, stop_token_ids=(full[6],))
    engine.ask(prompt(21, 1), "b", max_tokens=60)
    engine.ask(prompt(22, 2), "c", max_tokens=60)
    engine.ask(prompt(23, 3), "d", max_tokens=60)
    engine.until(lambda: len(engine.tokens("d")) > 3)
    engine.ask(prompt(24, 4), "e", max_tokens=8, **penalty)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == full[: full.index(full[6]) + 1]
    for number, name in enumerate("bcd", 1):
        assert engine.tokens(name) == engine.oracle(prompt(20 + number, number), 60)
    assert engine.tokens("e") == engine.oracle(prompt(24, 4), 8, **penalty)
    assert any(engine.deltas(name)[-1].timeline.num_preemptions for name in "bcd")


def test_a_failed_step_ends_its_requests_once_and_leaks_nothing(threaded: Callable[..., Rig]) -> None:
    engine = threaded()
    engine.ask(prompt(20), max_tokens=50)
    engine.ask(prompt(30, 1), "b", max_tokens=50)
    engine.until(lambda: len(engine.tokens()) > 4)
    engine.steps.fail_at = engine.steps.num_launched + 2
    engine.until(lambda: engine.is_clean)
    assert [len(engine.failures(name)) for name in "ab"] == [1, 1]
    assert engine.failures()[0].retryable and "the step failed" in engine.failures()[0].message
    engine.ask(prompt(20), "c")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("c") == engine.oracle(prompt(20))


def test_a_step_that_fails_beside_prompts_fails_its_requests_only(threaded: Callable[..., Rig]) -> None:
    engine = threaded()
    engine.engine.share_cores(BesidePrompts(), lambda num_threads: None)
    engine.ask(prompt(30), "a", max_tokens=50)
    engine.until(lambda: len(engine.tokens()) > 2)
    engine.steps.fail_at = engine.steps.num_launched + 2
    engine.until(lambda: engine.is_clean)
    (failed,) = engine.failures()
    assert failed.retryable and "the step failed" in failed.message
    engine.ask(prompt(20), "b")
    engine.until(lambda: engine.is_clean)
    assert engine.tokens("b") == engine.oracle(prompt(20))


def test_a_step_in_flight_is_awaited_within_its_own_limit(
    threaded: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = threaded(max_draft_tokens=4)
    monkeypatch.setattr(engine.engine.step_times, "limit_s", lambda shape, model: 77.0)
    complete, limits = engine.engine._complete_step, []

    def completed(step: Any) -> None:
        limits.append((step.has_drafts, engine.engine.turn_limit_s))
        complete(step)

    monkeypatch.setattr(engine.engine, "_complete_step", completed)
    engine.ask([1, 2, 3, 4] * 12, max_tokens=60)
    engine.until(lambda: engine.is_clean)
    assert set(limits) == {(False, 77.0), (True, 77.0)}


@pytest.mark.slow
def test_any_mixture_of_arrivals_and_ends(threaded: Callable[..., Rig]) -> None:
    engine = threaded(num_blocks=24, max_num_seqs=5, chunk=20)
    engine.mix(seed=7)
    assert engine.steps.num_fed > 50


def test_closing_waits_for_the_step_in_flight(threaded: Callable[..., Rig]) -> None:
    engine = threaded()
    engine.ask(prompt(20), max_tokens=50)
    engine.until(lambda: len(engine.tokens()) > 4)
    assert engine.engine.has_work
    engine.steps.close()
    assert engine.steps.num_run == engine.steps.num_launched
    engine.tell(AbortRequest(request_id="a", attempt=0))
    engine.until(lambda: engine.is_clean)
