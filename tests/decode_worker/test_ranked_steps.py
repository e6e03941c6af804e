"""The engine over two ranks, real processes that sum through gloo, which replay recorded steps launched ahead."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.engine.models.batch import SequenceChunk
from common.engine.ranks.processes import RankProcesses
from common.engine.ranks.steps import REPLAY, Numbers, RankedGraphRunner
from common.engine.run.loaded import LoadedModel
from common.engine.run.seats import FROM_HOST
from common.engine.run.step_launchers import StepLauncher

from .. import engine_rig
from ..rank_rig import recording_worker

Rig = Any  # EngineRig of conftest, which test modules cannot import
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.slow]
NUM_SEQS, NUM_BLOCKS = 8, 16
MIXED: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(5, 90, 3))},
]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(autouse=True)
def two_processes_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum waits until the system has run both: on a busy machine a step takes a tenth of a second."""
    monkeypatch.setattr(engine_rig, "WAIT_S", 400.0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LoadedModel]:
    with recording_worker("tiny-random", 2, num_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQS) as loaded:
        yield loaded


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Numbers]:
    """The messages to the other rank."""
    messages: list[Numbers] = []
    send = RankProcesses.send_step

    def remembered(processes: RankProcesses, message: Numbers) -> None:
        messages.append(message)
        send(processes, message)

    monkeypatch.setattr(RankProcesses, "send_step", remembered)
    return messages


@pytest.fixture
def ranked(make_engine: Callable[..., Rig], ranks: LoadedModel, sent: list[Numbers]) -> Callable[..., Rig]:
    def make(**options: object) -> Rig:
        return make_engine(runner=ranks.runner, launcher=StepLauncher, max_num_seqs=NUM_SEQS, **options)

    return make


def kinds(sent: list[Numbers]) -> Counter[str]:
    return Counter("replay" if message[0] == REPLAY else "chunks" for message in sent)


def test_rows_of_every_kind_get_the_tokens_of_the_plain_loop(
    ranked: Callable[..., Rig], ranks: LoadedModel, sent: list[Numbers]
) -> None:
    """Sampled by a recording or not, they reach the other rank: half of each head and of the vocabulary is there."""
    engine, prompts = ranked(), [prompt(length, length) for length in (1, 15, 17, 40)]
    for i, (tokens, params) in enumerate(zip(prompts, MIXED, strict=True)):
        engine.ask(tokens, f"r{i}", max_tokens=20, **params)
    engine.until(lambda: engine.is_clean)
    for i, (tokens, params) in enumerate(zip(prompts, MIXED, strict=True)):
        assert engine.tokens(f"r{i}") == engine.oracle(tokens, 20, **params)
    assert ranks.others is not None and not ranks.others.failure
    assert kinds(sent)["replay"] >= 18 > 4 >= kinds(sent)["chunks"]


def test_a_step_is_one_message_and_most_are_four_numbers(ranked: Callable[..., Rig], sent: list[Numbers]) -> None:
    engine = ranked()
    for i in range(2):
        engine.ask(prompt(20, i), f"r{i}", max_tokens=30)
    engine.until(lambda: engine.is_clean)
    replays = [message for message in sent if message[0] == REPLAY]
    assert 29 <= len(replays) <= 31  # launched ahead, and a sequence whose length is up is not run once more
    assert sum(len(message) == 4 for message in replays) >= 24
    for i in range(2):
        assert engine.tokens(f"r{i}") == engine.oracle(prompt(20, i), 30)


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_end_and_are_aborted(ranked: Callable[..., Rig], sent: list[Numbers], seed: int) -> None:
    """At random, in fewer blocks than they want: prompts beside rows, and preemption."""
    ranked().mix(seed)
    assert kinds(sent)["replay"] > 40 and kinds(sent)["chunks"] > 10


def test_preempted_sequences_go_on(ranked: Callable[..., Rig]) -> None:
    engine = ranked()
    for i in range(4):
        engine.ask(prompt(40, i), f"r{i}", max_tokens=60)
    engine.until(lambda: engine.is_clean)
    assert any(engine.deltas(f"r{i}")[-1].timeline.num_preemptions for i in range(4))
    for i in range(4):
        assert engine.tokens(f"r{i}") == engine.oracle(prompt(40, i), 60)


def test_what_the_host_refuses_harms_no_rank(ranked: Callable[..., Rig], ranks: LoadedModel) -> None:
    """A launch that is refused was sent to no rank; all of them go on together."""
    runner = ranks.runner
    assert isinstance(runner, RankedGraphRunner)
    with pytest.raises(Exception, match="a cache of 16"):
        runner.launch([SequenceChunk((1,), 3, [NUM_BLOCKS])], [FROM_HOST])
    engine = ranked()
    engine.ask(prompt(20), max_tokens=20)
    engine.until(lambda: engine.is_clean)
    assert engine.tokens() == engine.oracle(prompt(20), 20)
