"""Models whose layers see through windows, whose blocks are taken away as soon as no token sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.blocks.window import HOLE, Window
from common.engine.models.batch import SequenceChunk
from common.errors import BlockError

from ....families import CASES
from .generation import Pool, load, prompt, random_checkpoint, transformers_greedy, transformers_model

SIZE = 16
WINDOWED: dict[str, tuple[str, dict[str, Any], int]] = {
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 32}, 20),
    "mixtral": (*CASES["mixtral-window"], 20),
    "phi3": ("Phi3", {"pad_token_id": 0, "num_attention_heads": 3, "num_key_value_heads": 3, "sliding_window": 40}, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [200, 23])
@pytest.mark.parametrize("family", WINDOWED)
def test_no_block_is_read_once_it_is_out_of_the_window(tmp_path: Path, family: str, chunk: int) -> None:
    """Such a block holds NaN, and another sequence's numbers later; the table has a hole in its place."""
    name, options, window = WINDOWED[family]
    folder = random_checkpoint(tmp_path / family, name, **options)
    model, tokens = load(folder), prompt(130)
    assert model.config.window == window
    expected, _ = transformers_greedy(transformers_model(folder), tokens, 40)
    pool = Pool(model)
    table, view, done, found = pool.table(170), Window(window, SIZE), 0, list(tokens)
    while len(found) < 170:
        part = found[done : done + chunk]
        logits = pool.runner.forward([SequenceChunk(part, done, list(table), sample=True)])
        done += len(part)
        for index in range(view.first_block(done)):
            if table[index] != HOLE:
                pool.kv.tensor[table[index]] = float("nan")
                table[index] = HOLE
        if done == len(found):
            found.append(int(logits[0].argmax()))
    assert found[130:] == expected
    assert table.count(HOLE) == view.first_block(169)
    with pytest.raises(BlockError, match="blocks -1 to -1"):
        pool.runner.forward([SequenceChunk((1,), 100, table)])


def test_a_model_has_a_window_if_every_layer_has_one_that_matters(tmp_path: Path) -> None:
    gemma = load(random_checkpoint(tmp_path / "gemma2", *CASES["gemma2"][:1], **CASES["gemma2"][1]))
    assert any(gemma.config.layer_windows) and gemma.config.window == 0
    wide = load(random_checkpoint(tmp_path / "wide", "Mistral", sliding_window=2048, head_dim=32))
    assert wide.config.layer_windows == (2048,) * 3 and wide.config.window == 0  # as many tokens as the model takes
