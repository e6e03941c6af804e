"""Draft tokens of an EAGLE-3 head: the same tokens in fewer steps, whatever moves, and whatever tokens it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...eagle3_heads import eagle3_folder, far_model, right_eagle3
from ..drafting_engines import KINDS, Headed, answered, engines_that_draft

Rig = Any  # EngineRig of conftest, which test modules cannot import


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


@pytest.mark.slow_except("greedy")
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes(drafting: Callable[..., Rig], kind: str) -> None:
    rig = drafting(num_blocks=64, max_num_seqs=32, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] > 0.1 * counts["drafted"] > 2
    if kind == "greedy":
        assert counts["right"] == counts["drafted"] > 90


@pytest.mark.parametrize(
    "kind",
    [
        "greedy",
        pytest.param("seeded", marks=pytest.mark.slow),
        pytest.param("bias", marks=pytest.mark.slow),
        pytest.param("allowed", marks=pytest.mark.slow),
        pytest.param("grammar", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_knows_few_tokens_changes_none(drafting: Callable[..., Rig], narrow: Headed, kind: str) -> None:
    """What it does not know it never drafts; where nothing that it knows is allowed, it drafts nothing."""
    rig = drafting(num_blocks=64, max_num_seqs=32, headed=narrow, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] < 0.5 * counts["drafted"] if counts["drafted"] else kind in ("allowed", "grammar")
