"""Logits of draft heads beside their formula in float64, whatever the chunks; and the model's own, which stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.models.batch import NO_PLACE, ROW_BEFORE, ForwardBatch, SequenceChunk
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner

from .....draft_heads import PlainHead, eagle_folder, mtp_checkpoint, plain_eagle, plain_mtp
from ...weights.formats.checkpoints import write_checkpoint
from ..generation import files_of, prompt, random_checkpoint
from ..test_deepseek import V3_FP8

KINDS = ("deepseek-v3", "glm4-moe", "eagle", "eagle with a bias")
TOKENS = prompt(50)


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


def run(model: DraftingModel, tokens: Sequence[int], ends: Sequence[int]) -> tuple[ModelRunner, list[int]]:
    """The tokens in chunks that end there, with the last one's hidden state in place 3."""
    kv = KVCache(model.config, 8, 16, model.dtype)
    kv.tensor.fill_(float("nan"))  # nothing may be read that was not written
    runner, table = ModelRunner(model, kv), [5, 1, 7, 2]
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        before = 3 if start else NO_PLACE
        runner.forward([SequenceChunk(tokens[start:end], start, table, before=before, kept=3)])
    return runner, table


def drafted(runner: ModelRunner, table: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
    """Logits of two draft steps in a row, behind all of `tokens` but the last of which the model has run."""
    model = runner.model
    assert isinstance(model, DraftingModel)
    chunks = [SequenceChunk(tokens[-2:-1], len(tokens) - 2, table, before=3)]
    chunks += [SequenceChunk(tokens[-1:], len(tokens) - 1, table)]
    with torch.inference_mode():
        one, two = (ForwardBatch.build([chunk], model.draft_config, runner.kv) for chunk in chunks)
        first, states = model.draft(one, runner.kv)
        return [first[0], model.draft(two, runner.kv, states)[0][0]]


@pytest.mark.slow_cases("glm4-moe", "eagle with a bias")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formula(heads: Heads, kind: str) -> None:
    """A head that reads the model's hidden states, and then its own; with chunks the KV is the same."""
    plain, ran = heads.plain(kind), len(TOKENS) - 2
    states = plain.states(TOKENS[:ran])
    before = torch.cat((torch.zeros_like(states[:1]), states))
    first, own = plain.forward(TOKENS[: ran + 1], before)
    second, _ = plain.forward(TOKENS, torch.cat((before, own[-1:])))
    for ends in ((ran,), (17, 32, ran), (1, ran - 1, ran)):
        got = drafted(*run(heads.load(kind), TOKENS, ends), TOKENS)
        for ours, theirs in zip(got, (first[-1], second[-1]), strict=True):
            assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe", "eagle"])
def test_the_models_logits_keep_every_bit(heads: Heads, kind: str, dtype: str) -> None:
    folder, _ = heads.folders(kind)
    steps = []
    for model in (load_model(files_of(folder), dtype=dtype), heads.load(kind, dtype=dtype)):
        runner = ModelRunner(model, KVCache(model.config, 12, 16, dtype))
        chunks = [SequenceChunk(TOKENS, 0, range(4), all_logits=True), SequenceChunk((1, 2, 3), 0, (4,))]
        rows = [SequenceChunk((3,), 50, range(4)), SequenceChunk((4,), 3, (4,)), SequenceChunk((5,), 4, (4,))]
        steps.append(torch.cat((runner.forward(chunks), runner.forward(rows))))
    assert torch.equal(*steps)


def test_draft_rows_read_the_row_before(heads: Heads) -> None:
    """The rows of one sequence in a step write the KV that a chunk of them would have written."""
    model = heads.load("glm4-moe")
    (runner, table), (other, _) = run(model, TOKENS, (40, 48)), run(model, TOKENS, (40,))
    rows = [SequenceChunk((TOKENS[40],), 40, table, before=3, kept=1)]
    rows += [SequenceChunk((TOKENS[at],), at, table, before=ROW_BEFORE, kept=3) for at in range(41, 48)]
    other.forward(rows)
    assert torch.equal(*(each.kv.tensor[table[2], -1] for each in (runner, other)))
    first, second = (drafted(each, table, TOKENS)[0] for each in (runner, other))
    assert torch.equal(first, second)


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
    """Logits move by what rounding moves them, and not to other ones."""
    exact, rounded = (
        drafted(*run(heads.load("deepseek-v3", **given), TOKENS, (48,)), TOKENS)[0]
        for given in ({}, {"quantization": quantization})
    )
    assert not torch.equal(exact, rounded)
    assert torch.corrcoef(torch.stack((exact, rounded)))[0, 1] > {"int8": 0.99, "int4": 0.8}[quantization]


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
