"""Heads whose greedy tokens are the model's are right wherever their KV and hidden states come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_worker import speculation
from decode_worker.drafting import row_costs

from ..draft_heads import certain_model, right_eagle
from ..eagle3_heads import far_model, right_eagle3
from ..engine_rig import prompt
from .drafting_engines import Headed, NoLookup, answered
from .handover_pair import Pair
from .lazy_device import LazyDevice
from .prophet import counted

Rig = Any  # EngineRig of conftest, which test modules cannot import
MAKERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Path], Path]]] = {
    "eagle": (certain_model, right_eagle),
    "eagle3": (far_model, right_eagle3),
}


@pytest.fixture(scope="module", params=MAKERS)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    make_model, make_head = MAKERS[request.param]
    served = make_model(tmp_path_factory.mktemp("served") / "model")
    return Headed.load(served, str(make_head(tmp_path_factory.mktemp("right") / "head", served)))


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("eagle-waited for-8", "eagle3-waited for-8")
@pytest.mark.parametrize("num_blocks", [8, 12])
def test_preempted_sequences_give_the_same_tokens(drafting: Callable[..., Rig], num_blocks: int) -> None:
    """What they lost is computed again in chunks, with the hidden states between these."""
    rig = drafting(num_blocks=num_blocks, chunk=24)
    for seed in range(4):
        rig.ask(prompt(20, seed), f"r{seed}", max_tokens=40)
    rig.until(lambda: rig.is_clean)
    for seed in range(4):
        assert rig.tokens(f"r{seed}") == rig.oracle(prompt(20, seed), 40)
    assert any(rig.deltas(f"r{seed}")[-1].timeline.num_preemptions for seed in range(4))
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 10


@pytest.mark.slow_cases("eagle3-waited for")
def test_the_heads_kv_comes_with_the_prompts(drafting: Callable[..., Rig]) -> None:
    """One step without drafts makes the first hidden state here; the head then sees the whole prompt."""
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(tokens, remote=True, max_tokens=40)
    rig.ship(tokens, rig.granted(tokens))
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(tokens, 40)
    assert counted(rig) == {"steps": 8, "tokens": 39, "drafted": 31, "right": 31}


@pytest.mark.slow_cases("eagle-waited for", "eagle3-waited for")
def test_without_the_heads_kv_the_tokens_are_the_same(drafting: Callable[..., Rig]) -> None:
    """Zeros in its layer: what it says is worth less then."""
    rig, tokens = drafting(), prompt(70, 3)
    rig.ask(tokens, remote=True, max_tokens=40)
    first = rig.granted(tokens)
    layer = rig.kv.block_bytes // rig.served.config.num_layers
    rig.peer.blocks = [block[:-layer] + bytes(layer) for block in rig.peer.blocks]
    rig.ship(tokens, first)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(tokens, 40)
    counts = counted(rig)
    assert counts["right"] < counts["drafted"]


@pytest.mark.slow_cases("eagle-waited for", "eagle3-waited for")
def test_a_cached_prefix_has_the_heads_kv(drafting: Callable[..., Rig]) -> None:
    """The next turn of a conversation computes its last tokens alone."""
    rig = drafting()
    answered(rig, (40,))
    whole = prompt(40, 40) + rig.tokens("r40")
    before = counted(rig)
    rig.ask(whole, "again", max_tokens=20)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("again") == rig.oracle(whole, 20)
    after = counted(rig)
    assert rig.deltas("again")[0].num_cached_tokens == 64
    assert after["right"] - before["right"] == after["drafted"] - before["drafted"] > 10


@pytest.mark.slow_except("eagle-16", "eagle3-100")
@pytest.mark.parametrize("length", [1, 16, 100])
def test_a_stream_that_drafts_goes_on_elsewhere(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, right: Headed, length: int
) -> None:
    monkeypatch.setattr(speculation, "PromptLookup", NoLookup)
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
