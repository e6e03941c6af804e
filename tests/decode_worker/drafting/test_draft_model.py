"""Draft tokens of a second model: the same tokens in fewer steps, with KV that is there when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.wire.messages import AbortRequest, ResetPrefixCache
from decode_worker import speculation
from decode_worker.drafting import row_costs

from ...engine_rig import prompt
from ..drafting_engines import KINDS, KINDS_BY_LAUNCHER, LAUNCHERS, NoLookup, answered, engines_that_draft
from ..handover_pair import Pair
from ..lazy_device import LazyDevice
from ..prophet import counted

Rig = Any  # EngineRig of conftest, which test modules cannot import


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Another tiny model of the same vocabulary."""
    return load_model(resolve_model(str(make_tiny_model(tmp_path_factory.mktemp("other") / "tiny", seed=1))))


@pytest.fixture(params=LAUNCHERS)
def drafting(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    tiny: tuple[Decoder, tuple[int, ...]],
) -> Iterator[Callable[..., Rig]]:
    """Engines with a draft model, by default the model itself, to which rows cost nothing."""
    with engines_that_draft(request.param, make_engine, monkeypatch, draft=tiny[0]) as make:
        yield make


@pytest.mark.slow
@pytest.mark.parametrize(("drafting", "kind"), KINDS_BY_LAUNCHER, indirect=["drafting"])
def test_a_draft_model_that_is_the_model_is_always_right(drafting: Callable[..., Rig], kind: str) -> None:
    rig = drafting(num_blocks=64, max_num_seqs=32, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] == counts["drafted"] > 70
    assert counts["steps"] <= 20


@pytest.mark.slow_except("on a lazy device-greedy")
@pytest.mark.parametrize(("drafting", "kind"), KINDS_BY_LAUNCHER, indirect=["drafting"])
def test_another_draft_model_changes_no_token(drafting: Callable[..., Rig], other: Decoder, kind: str) -> None:
    rig = drafting(num_blocks=64, max_num_seqs=32, draft=other, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["drafted"] > 10 and counts["right"] < counts["drafted"]


def test_every_token_right_makes_as_few_steps_as_there_can_be(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(5), max_tokens=61)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(5), 61)
    assert counted(rig) == {"steps": 11, "tokens": 61, "drafted": 50, "right": 50}  # the first token, ten times six


@pytest.mark.slow_except("on a thread-12")
@pytest.mark.parametrize("num_blocks", [8, 10, 12])
def test_preempted_sequences_give_the_same_tokens(
    drafting: Callable[..., Rig], other: Decoder, num_blocks: int
) -> None:
    for draft in (None, other):
        rig = drafting(num_blocks=num_blocks, chunk=24, **({"draft": draft} if draft else {}))
        for seed in range(4):
            rig.ask(prompt(20, seed), f"r{seed}", max_tokens=40)
        rig.until(lambda rig=rig: rig.is_clean)
        for seed in range(4):
            assert rig.tokens(f"r{seed}") == rig.oracle(prompt(20, seed), 40)
        assert any(rig.deltas(f"r{seed}")[-1].timeline.num_preemptions for seed in range(4))
        assert counted(rig)["drafted"] > 10


@pytest.mark.slow
def test_requests_that_come_and_go(drafting: Callable[..., Rig], other: Decoder) -> None:
    for draft in (None, other):
        rig = drafting(num_blocks=48, num_draft_blocks=32, **({"draft": draft} if draft else {}))
        rig.mix(0)
        assert counted(rig)["drafted"] > 20
        assert rig.drafter.cache.check_integrity().owned == 0


@pytest.mark.slow_cases("waited for")
def test_too_few_blocks_for_drafts_are_no_harm(drafting: Callable[..., Rig]) -> None:
    rig = drafting(num_draft_blocks=3)
    counts = answered(rig, (20, 30, 40))
    assert 0 < counts["right"] == counts["drafted"] < 90


def test_an_aborted_request_gives_its_draft_blocks_back(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(20), max_tokens=200)
    rig.until(lambda: len(rig.tokens()) > 20)
    assert rig.drafter.cache.pool.counts.owned
    rig.tell(AbortRequest(request_id="a", attempt=0))
    rig.until(lambda: rig.is_clean)
    assert rig.drafter.cache.pool.counts.owned == 0


# ---------------------------------------------------------------- KV that comes from elsewhere


@pytest.mark.slow_cases("waited for")
def test_it_catches_up_while_the_prompt_is_on_its_way(drafting: Callable[..., Rig]) -> None:
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(tokens, remote=True, max_tokens=40)
    rig.until(lambda: list(rig.engine.scheduler))
    (sequence,) = rig.engine.scheduler
    rig.until(lambda: rig.drafter.is_ready(sequence) and not rig.engine.has_work)
    assert rig.drafter.cache.pool.counts.owned in (4, 5)  # slow steps are short, and leave at most MAX_BEHIND tokens
    rig.ship(tokens, rig.granted(tokens))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(tokens, 40)
    assert counted(rig) == {"steps": 7, "tokens": 39, "drafted": 32, "right": 32}


@pytest.mark.slow_except("on a lazy device")
def test_without_idle_time_it_catches_up_beside_other_steps(drafting: Callable[..., Rig]) -> None:
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(prompt(20), "b", max_tokens=120)
    rig.until(lambda: rig.tokens("b"))
    rig.ask(tokens, remote=True, max_tokens=40)
    rig.ship(tokens, rig.granted(tokens))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(tokens, 40) and rig.tokens("b") == rig.oracle(prompt(20), 120)
    counts = counted(rig)
    assert counts["steps"] < 60 and counts["right"] == counts["drafted"]


def test_prompts_that_begin_alike_are_caught_up_with_once(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    ran: list[int] = []
    forward = rig.drafter._runner.forward

    def counting(chunks: list[SequenceChunk]) -> Any:
        ran.append(sum(len(chunk.token_ids) for chunk in chunks))
        return forward(chunks)

    rig.drafter._runner.forward = counting
    answered(rig, (40,))
    first = sum(ran)
    whole = prompt(40, 40) + rig.tokens("r40")
    rig.ask(whole, "again", max_tokens=20)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("again") == rig.oracle(whole, 20)
    assert sum(ran) - first < 16 + 2 * 20  # less than a block, and the new ones: not the 80 tokens before
    rig.tell(ResetPrefixCache(request_id="x"))
    rig.until(lambda: rig.engine._inbox.empty())
    assert rig.drafter.cache.pool.counts.cached == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 16, 100])
def test_a_stream_that_drafts_goes_on_elsewhere(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tiny: tuple[Decoder, Any], length: int
) -> None:
    monkeypatch.setattr(speculation, "PromptLookup", NoLookup)
    monkeypatch.setattr(row_costs.RowCosts, "seconds", lambda costs, num_rows: 1.0)
    pair = Pair(make_engine, max_draft_tokens=5, launcher=LazyDevice, draft=tiny[0])
    pair.start(length, tokens=2)
    pair.hand_over(reserved=20)
    pair.wait(pair.moved)
    pair.finish()
    assert counted(pair.old)["right"] > 0
    assert pair.old.drafter.cache.check_integrity().owned == 0


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.slow_cases("on a lazy device")
def test_a_draft_model_that_fails_is_done_without(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(20), max_tokens=40)
    rig.until(lambda: len(rig.tokens()) > 10)

    def fail(chunks: object) -> None:
        raise RuntimeError("no memory")

    rig.drafter._runner.forward = fail
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(20), 40)
    assert not rig.failures() and rig.drafter.cache.pool.counts.owned == 0
    counts = answered(rig, (17,))
    assert counts["steps"] > 40


def test_tokens_that_a_smaller_table_lacks_are_left_alone(drafting: Callable[..., Rig], other: Decoder) -> None:
    """The vocabularies of two sizes of one model may end in more or fewer rows that stand for nothing."""
    rig = drafting(draft=other)
    rig.drafter._runner.model.config = replace(other.config, vocab_size=100)
    try:
        rig.ask([150, 151, *prompt(20)], max_tokens=20)
        rig.until(lambda: rig.is_clean)
    finally:
        rig.drafter._runner.model.config = replace(other.config, vocab_size=261)
    assert rig.tokens() == rig.oracle([150, 151, *prompt(20)], 20)
    assert counted(rig)["drafted"] == 0
