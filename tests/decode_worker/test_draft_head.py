"""Draft tokens of a head that reads the model's hidden states: the same tokens in fewer steps, whatever moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.wire.messages import AbortRequest
from decode_worker import speculation
from decode_worker.drafting import row_costs

from ..draft_heads import certain_model, eagle_folder, right_eagle, right_mtp, with_tokenizer
from ..engine_rig import prompt
from .drafter_rig import Headed
from .drafting_engines import KINDS, LAUNCHERS, NoLookup, TrueAnswers, engines_that_draft
from .handover_pair import Pair
from .lazy_device import LazyDevice
from .prophet import counted, total

Rig = Any  # EngineRig of conftest, which test modules cannot import
ANSWERS = TrueAnswers()
truth, answered = ANSWERS.truth, ANSWERS.answered


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certain_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def right(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """With a head whose greedy tokens are the model's."""
    return Headed.load(served, str(right_eagle(tmp_path_factory.mktemp("right") / "head", served)))


@pytest.fixture(scope="module")
def wrong(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """With a head that is hardly ever of the model's opinion."""
    return Headed.load(served, str(eagle_folder(tmp_path_factory.mktemp("wrong") / "head", served)))


@pytest.fixture(params=LAUNCHERS)
def drafting(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    right: Headed,
) -> Iterator[Callable[..., Rig]]:
    """Engines with a draft head, by default the right one, to which rows cost nothing."""
    with engines_that_draft(request.param, make_engine, monkeypatch, headed=right) as make:
        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes(drafting: Callable[..., Rig], kind: str) -> None:
    """Drawn with the same noise, many of its tokens are right where its logits are not the model's, only like them."""
    rig = drafting(num_blocks=64, max_num_seqs=32, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] > 0.1 * counts["drafted"] > 2
    if kind == "greedy":
        assert counts["right"] == counts["drafted"] > 90


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties"])
def test_a_head_that_is_wrong_changes_no_token(drafting: Callable[..., Rig], wrong: Headed, kind: str) -> None:
    counts = answered(drafting(num_blocks=64, max_num_seqs=32, headed=wrong), **KINDS[kind])
    assert counts["drafted"] > 10 and counts["right"] < 0.5 * counts["drafted"]


def test_every_token_right_makes_as_few_steps_as_there_can_be(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(5), max_tokens=61)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == truth(rig, prompt(5), 61)
    assert counted(rig) == {"steps": 11, "tokens": 61, "drafted": 50, "right": 50}  # the first token, ten times six
    assert total(rig.engine.metrics.drafts.accepted, kind="model") == 50


@pytest.mark.parametrize("num_blocks", [8, 12])
def test_preempted_sequences_give_the_same_tokens(drafting: Callable[..., Rig], num_blocks: int) -> None:
    """What they lost is computed again in chunks, with the hidden states between these."""
    rig = drafting(num_blocks=num_blocks, chunk=24)
    for seed in range(4):
        rig.ask(prompt(20, seed), f"r{seed}", max_tokens=40)
    rig.until(lambda: rig.is_clean)
    for seed in range(4):
        assert rig.tokens(f"r{seed}") == truth(rig, prompt(20, seed))
    assert any(rig.deltas(f"r{seed}")[-1].timeline.num_preemptions for seed in range(4))
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 10


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_and_go(drafting: Callable[..., Rig], seed: int) -> None:
    rig = drafting(num_blocks=48)
    rig.mix(seed)
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 20
    rig.later(0.0)
    assert len(rig.engine._hidden) == 0


def test_too_few_places_cost_drafts_and_no_token(drafting: Callable[..., Rig], served: Path, right: Headed) -> None:
    rig = drafting()
    rig.engine._hidden._free = rig.engine._hidden._free[:4]
    counts = answered(rig, (1, 17, 40))
    assert 0 < counts["right"] <= counts["drafted"] < 90


def test_an_aborted_request_gives_its_places_back(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(20), max_tokens=200)
    rig.until(lambda: len(rig.tokens()) > 20)
    assert len(rig.engine._hidden) == 1
    rig.tell(AbortRequest(request_id="a", attempt=0))
    rig.until(lambda: rig.is_clean)
    rig.later(0.0)
    assert len(rig.engine._hidden) == 0


# ---------------------------------------------------------------- KV that comes from elsewhere


def test_the_heads_kv_comes_with_the_prompts(drafting: Callable[..., Rig]) -> None:
    """One step without drafts makes the first hidden state here; the head then sees the whole prompt."""
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(tokens, remote=True, max_tokens=40)
    rig.ship(tokens, rig.granted(tokens))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == truth(rig, tokens)
    assert counted(rig) == {"steps": 8, "tokens": 39, "drafted": 31, "right": 31}


def test_without_the_heads_kv_the_tokens_are_the_same(drafting: Callable[..., Rig]) -> None:
    """Zeros in its layer: what it says is worth less then."""
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(tokens, remote=True, max_tokens=40)
    first = rig.granted(tokens)
    layer = rig.kv.block_bytes // rig.served.config.num_layers
    rig.peer.blocks = [block[:-layer] + bytes(layer) for block in rig.peer.blocks]
    rig.ship(tokens, first)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == truth(rig, tokens)
    counts = counted(rig)
    assert counts["right"] < counts["drafted"]


def test_a_cached_prefix_has_the_heads_kv(drafting: Callable[..., Rig]) -> None:
    """The next turn of a conversation computes its last tokens alone."""
    rig = drafting()
    answered(rig, (40,))
    whole = prompt(40, 40) + rig.tokens("r40")
    before = counted(rig)
    rig.ask(whole, "again", max_tokens=20)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("again") == truth(rig, whole, 20)
    after = counted(rig)
    assert rig.deltas("again")[0].num_cached_tokens == 64
    assert after["right"] - before["right"] == after["drafted"] - before["drafted"] > 10


@pytest.mark.parametrize("length", [1, 16, 100])
def test_a_stream_that_drafts_goes_on_elsewhere(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, right: Headed, length: int
) -> None:
    monkeypatch.setattr(speculation, "Lookup", NoLookup)
    monkeypatch.setattr(row_costs.RowCosts, "seconds", lambda costs, num_rows: 1.0)
    options = {"max_draft_tokens": 5, "launcher": LazyDevice, "headed": right}
    pair = Pair(lambda **given: make_engine(**options | given))
    pair.start(length, tokens=2)
    pair.hand_over(reserved=20)
    pair.wait(pair.moved)
    pair.finish()
    for rig in (pair.old, pair.new):
        counts = counted(rig)
        assert counts["right"] == counts["drafted"]
    assert counted(pair.new)["right"] > 0


# ---------------------------------------------------------------- other heads, and what goes wrong


@pytest.mark.parametrize("case", ["deepseek-v3", "glm4-moe"])
def test_an_mtp_layer_of_the_checkpoint(drafting: Callable[..., Rig], tmp_path: Path, case: str) -> None:
    """The answers are compared with those of an engine that drafts nothing: experts are not what the oracle knows."""
    folder = with_tokenizer(right_mtp(tmp_path / case, case, num_layers=2))
    headed, found = Headed.load(folder, "mtp"), []
    for max_draft_tokens in (0, 5):
        rig = drafting(headed=headed, max_draft_tokens=max_draft_tokens)
        for length in (1, 17, 40):
            rig.ask(prompt(length, length), f"r{length}", max_tokens=40, ignore_eos=True)
        rig.until(lambda rig=rig: rig.is_clean)
        found.append([rig.tokens(f"r{length}") for length in (1, 17, 40)])
    assert found[0] == found[1]
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 20


def test_a_head_that_fails_is_done_without(drafting: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = drafting()
    rig.ask(prompt(20), max_tokens=40)
    rig.until(lambda: len(rig.tokens()) > 10)

    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rig.served._draft_head, "forward", fail)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == truth(rig, prompt(20)) and not rig.failures()
    before = counted(rig)["drafted"]
    assert answered(rig, (17,))["drafted"] == before
