"""Draft tokens of an EAGLE-3 head: the same tokens in fewer steps, whatever moves, and whatever tokens it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker import speculation
from decode_worker.drafting import row_costs

from ..eagle3_heads import eagle3_folder, far_model, right_eagle3
from ..engine_rig import prompt
from .drafter_rig import Headed
from .drafting_engines import KINDS, NoLookup, TrueAnswers, engines_that_draft
from .handover_pair import Pair
from .lazy_device import LazyDevice
from .prophet import counted

Rig = Any  # EngineRig of conftest, which test modules cannot import
ANSWERS = TrueAnswers()
truth, answered = ANSWERS.truth, ANSWERS.answered


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def right(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """With a head whose greedy tokens are the model's."""
    return Headed.load(served, str(right_eagle3(tmp_path_factory.mktemp("right") / "head", served)))


@pytest.fixture(scope="module")
def narrow(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """With a random head, of other sizes than the model, that knows few tokens."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "target_hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    head = eagle3_folder(
        tmp_path_factory.mktemp("narrow") / "head", served, draft_vocab_size=60, own_embedding=True, **sizes
    )
    return Headed.load(served, str(head))


@pytest.fixture
def drafting(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, right: Headed
) -> Iterator[Callable[..., Rig]]:
    """Engines with a head, by default the right one, to which rows cost nothing."""
    with engines_that_draft("on a lazy device", make_engine, monkeypatch, headed=right) as make:
        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes(drafting: Callable[..., Rig], kind: str) -> None:
    rig = drafting(num_blocks=64, max_num_seqs=32, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] > 0.1 * counts["drafted"] > 2
    if kind == "greedy":
        assert counts["right"] == counts["drafted"] > 90


@pytest.mark.parametrize("kind", ["greedy", "seeded", "bias", "allowed", "grammar"])
def test_a_head_that_knows_few_tokens_changes_none(drafting: Callable[..., Rig], narrow: Headed, kind: str) -> None:
    """What it does not know it never drafts; where nothing that it knows is allowed, it drafts nothing."""
    rig = drafting(num_blocks=64, max_num_seqs=32, headed=narrow, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] < 0.5 * counts["drafted"] if counts["drafted"] else kind in ("allowed", "grammar")


@pytest.mark.parametrize("num_blocks", [8, 12])
def test_preempted_sequences_give_the_same_tokens(drafting: Callable[..., Rig], num_blocks: int) -> None:
    rig = drafting(num_blocks=num_blocks, chunk=24)
    for seed in range(4):
        rig.ask(prompt(20, seed), f"r{seed}", max_tokens=40)
    rig.until(lambda: rig.is_clean)
    for seed in range(4):
        assert rig.tokens(f"r{seed}") == truth(rig, prompt(20, seed))
    assert any(rig.deltas(f"r{seed}")[-1].timeline.num_preemptions for seed in range(4))
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 10


def test_the_heads_kv_comes_with_the_prompts(drafting: Callable[..., Rig]) -> None:
    """One step without drafts makes the first state here; the head then sees the whole prompt."""
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
    rig = drafting()
    answered(rig, (40,))
    whole, before = prompt(40, 40) + rig.tokens("r40"), counted(rig)
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
