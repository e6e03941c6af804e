"""Logits of draft heads beside their formula in float64, whatever the chunks; and the model's own, which stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.models.batch import SequenceChunk
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model

from .....draft_heads import PlainHead, eagle_folder, mtp_checkpoint, plain_eagle, plain_mtp
from ...weights.formats.checkpoints import write_checkpoint
from ..generation import files_of, random_checkpoint
from ..test_deepseek import V3_FP8
from .head_checks import TOKENS, check_draft_rows, check_every_bit, check_formula, check_rounding, drafted, run

KINDS = ("deepseek-v3", "glm4-moe", "eagle", "eagle with a bias")


class Heads:
    """The checkpoints of this module, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, str]] = {}

    def folders(self, kind: str) -> tuple[Path, str]:
        """The served model, and what --draft-head says."""
        if kind not in self._made:
            folder = self._folder / kind.replace(" ", "-")
            if not kind.startswith("eagle"):
                self._made[kind] = mtp_checkpoint(folder, kind), "mtp"
            else:
                served = random_checkpoint(folder, "Llama")
                head = eagle_folder(folder / "head", served, biased="bias" in kind)
                self._made[kind] = served, str(head)
        return self._made[kind]

    def load(self, kind: str, **options: str) -> DraftingModel:
        folder, name = self.folders(kind)
        return load_drafting_model(files_of(folder), name, num_places=8, **options)

    def plain(self, kind: str) -> PlainHead:
        folder, name = self.folders(kind)
        return plain_mtp(folder) if name == "mtp" else plain_eagle(Path(name), folder)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


@pytest.mark.slow_cases("glm4-moe", "eagle with a bias")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formula(heads: Heads, kind: str) -> None:
    check_formula(heads.plain(kind), lambda: heads.load(kind))


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe", "eagle"])
def test_the_models_logits_keep_every_bit(heads: Heads, kind: str, dtype: str) -> None:
    folder, _ = heads.folders(kind)
    check_every_bit((load_model(files_of(folder), dtype=dtype), heads.load(kind, dtype=dtype)), dtype)


def test_draft_rows_read_the_row_before(heads: Heads) -> None:
    check_draft_rows(heads.load("glm4-moe"))


def test_a_hidden_state_that_nobody_has_is_zeros(heads: Heads) -> None:
    """Then only keys and values of that one token differ."""
    model = heads.load("eagle")
    (runner, table), (other, _) = run(model, TOKENS, (48,)), run(model, TOKENS, (32,))
    other.forward([SequenceChunk(TOKENS[32:48], 32, table, kept=3)])
    differs = [
        (a != b).any(dim=-1).any(dim=-1).any(dim=0)
        for a, b in ((runner.kv.tensor[block, -1], other.kv.tensor[block, -1]) for block in table[:3])
    ]
    assert [slots.tolist() for slots in differs] == [[False] * 16, [False] * 16, [True] + [False] * 15]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_matrices_are_rounded_as_the_models_are(heads: Heads, quantization: str) -> None:
    check_rounding(lambda **given: heads.load("deepseek-v3", **given), quantization)


def test_a_quantised_checkpoint_has_a_quantised_head(heads: Heads, tmp_path: Path) -> None:
    """DeepSeek's own form, fp8 in blocks: the head says what the floats say that its numbers stand for."""
    folder, _ = heads.folders("deepseek-v3")
    dense = write_checkpoint(folder, tmp_path / "fp8", V3_FP8, ignored="head")
    found = [
        drafted(*run(load_drafting_model(files_of(each), "mtp", num_places=8), TOKENS, (48,)), TOKENS)
        for each in (tmp_path / "fp8", dense)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert not torch.equal(found[0][0], drafted(*run(heads.load("deepseek-v3"), TOKENS, (48,)), TOKENS)[0])
