"""Draft tokens of a head that reads the model's hidden states: the same tokens in fewer steps, whatever moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.wire.messages import AbortRequest

from ...draft_heads import certain_model, eagle_folder, right_eagle, right_mtp, with_tokenizer
from ...engine_rig import prompt
from ..drafting_engines import KINDS, KINDS_BY_LAUNCHER, Headed, answered
from ..prophet import counted, total

Rig = Any  # EngineRig of conftest, which test modules cannot import


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


@pytest.mark.slow_except("on a lazy device-greedy", "on a lazy device-thoughts")
@pytest.mark.parametrize(("drafting", "kind"), KINDS_BY_LAUNCHER, indirect=["drafting"])
def test_no_token_changes(drafting: Callable[..., Rig], kind: str) -> None:
    """Drawn with the same noise, many of its tokens are right where its logits are not the model's, only like them."""
    rig = drafting(num_blocks=64, max_num_seqs=32, grammars=kind == "grammar")
    counts = answered(rig, **KINDS[kind])
    assert counts["right"] > 0.1 * counts["drafted"] > 2
    if kind == "greedy":
        assert counts["right"] == counts["drafted"] > 90


@pytest.mark.slow_except("on a thread-greedy")
@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties"])
def test_a_head_that_is_wrong_changes_no_token(drafting: Callable[..., Rig], wrong: Headed, kind: str) -> None:
    counts = answered(drafting(num_blocks=64, max_num_seqs=32, headed=wrong), **KINDS[kind])
    assert counts["drafted"] > 10 and counts["right"] < 0.5 * counts["drafted"]


def test_every_token_right_makes_as_few_steps_as_there_can_be(drafting: Callable[..., Rig]) -> None:
    rig = drafting()
    rig.ask(prompt(5), max_tokens=61)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens() == rig.oracle(prompt(5), 61)
    assert counted(rig) == {"steps": 11, "tokens": 61, "drafted": 50, "right": 50}  # the first token, ten times six
    assert total(rig.engine.metrics.drafts.accepted, kind="model") == 50


@pytest.mark.slow
def test_requests_that_come_and_go(drafting: Callable[..., Rig]) -> None:
    rig = drafting(num_blocks=48)
    rig.mix(0)
    counts = counted(rig)
    assert counts["right"] == counts["drafted"] > 20
    rig.later(0.0)
    assert len(rig.engine._hidden) == 0


def test_too_few_places_cost_drafts_and_no_token(drafting: Callable[..., Rig]) -> None:
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


# ---------------------------------------------------------------- other heads, and what goes wrong


@pytest.mark.slow_except("on a thread-deepseek-v3")
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
    assert rig.tokens() == rig.oracle(prompt(20), 40) and not rig.failures()
    before = counted(rig)["drafted"]
    assert answered(rig, (17,))["drafted"] == before
