"""What the logits of every draft head must be, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.models.batch import NO_SLOT, ROW_BEFORE, ForwardBatch, SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.run.runner import ModelRunner

from ..generation import prompt

TOKENS = prompt(50)


def run(model: DraftingModel, tokens: Sequence[int], ends: Sequence[int]) -> tuple[ModelRunner, list[int]]:
    """The tokens in chunks that end there, with the last one's hidden state in place 3."""
    kv = KVCache(model.config, 8, 16, model.dtype)
    kv.tensor.fill_(float("nan"))  # nothing may be read that was not written
    runner, table = ModelRunner(model, kv), [5, 1, 7, 2]
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        before = 3 if start else NO_SLOT
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


def check_formula(plain: Any, load: Callable[[], DraftingModel]) -> None:
    """A head that reads the model's hidden states, and then its own; with chunks the KV is the same."""
    ran = len(TOKENS) - 2
    states = plain.states(TOKENS[:ran])
    before = torch.cat((torch.zeros_like(states[:1]), states))
    first, own = plain.forward(TOKENS[: ran + 1], before)
    second, _ = plain.forward(TOKENS, torch.cat((before, own[-1:])))
    for ends in ((ran,), (17, 32, ran), (1, ran - 1, ran)):
        got = drafted(*run(load(), TOKENS, ends), TOKENS)
        for ours, theirs in zip(got, (first[-1], second[-1]), strict=True):
            known = theirs != -torch.inf  # the others are tokens that the head does not know
            assert torch.equal(ours.isfinite(), known)
            assert (ours - theirs)[known].abs().max() < 2e-4 * theirs[known].abs().max()


def check_every_bit(models: Sequence[Decoder | DraftingModel], dtype: str) -> None:
    """Two models have equal logits in steps of prompts and rows, all and some of which are sampled."""
    steps = []
    for model in models:
        runner = ModelRunner(model, KVCache(model.config, 12, 16, dtype))
        chunks = [SequenceChunk(TOKENS, 0, range(4), all_logits=True), SequenceChunk((1, 2, 3), 0, (4,))]
        rows = [SequenceChunk((3,), 50, range(4)), SequenceChunk((4,), 3, (4,)), SequenceChunk((5,), 4, (4,))]
        last = [SequenceChunk(TOKENS, 0, range(6, 10)), SequenceChunk((6,), 5, (4,), sample=False)]
        steps.append(torch.cat([runner.forward(each) for each in (chunks, rows, last)]))
    assert torch.equal(*steps)


def check_draft_rows(model: DraftingModel) -> None:
    """The rows of one sequence in a step write the KV that a chunk of them would have written."""
    (runner, table), (other, _) = run(model, TOKENS, (40, 48)), run(model, TOKENS, (40,))
    rows = [SequenceChunk((TOKENS[40],), 40, table, before=3, kept=1)]
    rows += [SequenceChunk((TOKENS[at],), at, table, before=ROW_BEFORE, kept=3) for at in range(41, 48)]
    other.forward(rows)
    assert torch.equal(*(each.kv.tensor[table[2], -1] for each in (runner, other)))
    first, second = (drafted(each, table, TOKENS)[0] for each in (runner, other))
    assert torch.equal(first, second)


def check_rounding(load: Callable[..., DraftingModel], quantization: str) -> None:
    """Logits move by what rounding moves them, and not to other ones."""
    exact, rounded = (
        drafted(*run(load(**given), TOKENS, (48,)), TOKENS)[0] for given in ({}, {"quantization": quantization})
    )
    assert not torch.equal(exact, rounded)
    assert torch.corrcoef(torch.stack((exact, rounded)))[0, 1] > {"int8": 0.99, "int4": 0.8}[quantization]
