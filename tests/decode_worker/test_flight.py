"""The engine over a device as asynchronous as can be: a launched step runs when somebody waits for its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.common.messages import AbortRequest, KVGrant
from diptych.common.model.batch import SequenceChunk
from diptych.common.model.runner import ModelRunner
from diptych.common.model.sampler import Sampler, SamplingRow

Rig = Any  # EngineRig of conftest, which test modules cannot import


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@dataclass(eq=False)
class LazyTokens:
    """A step that has not run. `before` must have run first; row i takes its token from row `sources[i]` of it."""

    device: LazyDevice
    before: LazyTokens | None
    chunks: list[SequenceChunk]
    sources: list[int]
    rows: list[SamplingRow]
    ids: list[int] = field(default_factory=list)

    def read(self) -> list[int]:
        if not self.ids:
            if self.before is not None:
                self.before.read()
            self.device.run(self)
            self.before = None
        return self.ids


class LazyDevice:
    """Implements `Launcher`. `fail_at` is the number of the step that fails when it runs, `refuse_at` when launched."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner, self.sampler = runner, sampler
        self.last: LazyTokens | None = None
        self.num_launched = self.num_fed = self.num_run = 0
        self.fail_at = self.refuse_at = 0
        self.on_run: Callable[[], object] = lambda: None

    def takes(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> bool:
        single = all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks)
        return single and len(rows) == len(chunks) and self.sampler.can_launch(rows)

    def launch(
        self, chunks: Sequence[SequenceChunk], sources: Sequence[int], rows: Sequence[SamplingRow]
    ) -> LazyTokens:
        if self.num_launched + 1 == self.refuse_at:
            self.refuse_at = 0
            raise RuntimeError("nothing can be launched")
        copies = [SequenceChunk(tuple(c.token_ids), c.start, tuple(c.block_table), c.sample) for c in chunks]
        self.last = LazyTokens(self, self.last, copies, list(sources), list(rows))
        self.num_launched += 1
        self.num_fed += sum(source >= 0 for source in sources)
        return self.last

    def close(self) -> None:
        """Nothing runs by itself."""

    def run(self, step: LazyTokens) -> None:
        self.on_run()
        self.num_run += 1
        if self.num_run == self.fail_at:
            step.ids = [0] * len(step.chunks)
            raise RuntimeError("the device failed")
        fed = step.before.ids if step.before is not None else []
        chunks = [
            SequenceChunk((fed[source],), chunk.start, chunk.block_table) if source >= 0 else chunk
            for chunk, source in zip(step.chunks, step.sources, strict=True)
        ]
        step.ids = self.sampler.launch(self.runner.forward(chunks), step.rows).tolist()


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


def test_a_stop_token_is_seen_one_step_late_and_nothing_follows_it(ahead: Callable[..., Rig]) -> None:
    engine = ahead()
    full = engine.oracle(prompt(20), 20)
    engine.ask(prompt(20), max_tokens=20, stop_token_ids=(full[6],))
    engine.ask(prompt(33, 1), "b", max_tokens=20)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == full[: full.index(full[6]) + 1]
    assert engine.tokens("b") == engine.oracle(prompt(33, 1), 20)


def test_a_device_that_fails_at_the_end_leaves_no_thread(
    ahead: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ended = ahead(), []

    def close() -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(engine.device, "close", close)
        for owner in (engine.engine._transfers, engine.engine._departures):
            broken.setattr(type(owner), "stop", lambda owner: ended.append(owner))
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.engine.close()
    assert ended == [engine.engine._transfers, engine.engine._departures]


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


def test_sequences_that_need_the_host_share_the_batch(ahead: Callable[..., Rig]) -> None:
    """Penalties and log-probabilities want every token on the host: such steps wait for the one before."""
    engine = ahead()
    penalty: dict[str, object] = {"presence_penalty": 1.5, "temperature": 0.7, "seed": 1}
    engine.ask(prompt(20), max_tokens=40)
    engine.turn(4)
    engine.ask(prompt(21, 1), "b", max_tokens=8, **penalty)
    engine.ask(prompt(22, 2), "c", max_tokens=6, logprobs=1)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20), 40)
    assert engine.tokens("b") == engine.oracle(prompt(21, 1), 8, **penalty)
    assert engine.tokens("c") == engine.oracle(prompt(22, 2), 6)
    assert all(entry.logprobs for entry in engine.deltas("c"))
    assert engine.device.num_fed > 15


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
