"""Quantised checkpoints against models of the floats that they stand for, which the tests' own writers work out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model, open_model

from .....oracle import Oracle
from ...models.generation import Pool, files_of, load, prompt
from .checkpoints import FORMATS, write_checkpoint

NAMES = [f"model.layers.0.{part}_proj.weight" for part in ("self_attn.q", "self_attn.v", "mlp.gate", "mlp.down")]


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in one format; beside it, FOLDER-dense."""
    folder = tmp_path_factory.mktemp("checkpoints") / str(request.param)
    write_checkpoint(tiny_folder, folder, FORMATS[request.param])
    return folder


def dense_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-dense")


@pytest.mark.slow_cases("fp8 by channel")
def test_every_matrix_is_what_it_stands_for(checkpoint: Path) -> None:
    _, source = open_model(files_of(checkpoint))
    _, floats = open_model(files_of(dense_of(checkpoint)))
    assert source.has_quantised and not source.is_quantised("lm_head.weight")
    for name in NAMES:
        assert source.has(name) and source.is_quantised(name)
        assert torch.equal(source.read(name), floats.read(name)), name


def test_logits_and_tokens_are_those_of_the_floats(checkpoint: Path) -> None:
    model, dense = load(checkpoint), load(dense_of(checkpoint))
    assert model.quantization == "none"
    logits = [Oracle(one).forward(prompt(40), Oracle(one).empty_cache()) for one in (model, dense)]
    assert torch.equal(*logits)
    assert Pool(model).greedy(prompt(40), 12, chunk=16) == Pool(dense).greedy(prompt(40), 12)


def test_integers_are_kept_where_the_kernels_have_their_format(checkpoint: Path) -> None:
    wanted = FORMATS[checkpoint.name].kept
    model, dense = automatic(checkpoint), load(dense_of(checkpoint))
    assert model.quantization == "auto"
    _, source = open_model(files_of(checkpoint))
    held = source.read_quantised("model.layers.0.mlp.down_proj.weight")
    assert wanted == (0 if held is None else held.bits)
    for layer, floats in zip(model.weights.layers, dense.weights.layers, strict=True):
        found, wanted_of = ((one.qkv, one.output, one.mlp.gate_up, one.mlp.down) for one in (layer, floats))
        for kept, expected in zip(found, wanted_of, strict=True):
            # Kept integers lose what their scales lose in float16, others what 8 bits lose.
            tolerance = 2.0**-10 if wanted else 1 / 127
            limit = tolerance * float(expected.weight.abs().max())
            assert float((kept.weight - expected.weight).abs().max()) <= limit
            if kept.native is not None and wanted:
                assert kept.native.num_bytes <= expected.weight.numel() * {4: 5, 8: 9.5}[wanted] / 8


def automatic(folder: Path) -> Decoder:
    return load_model(files_of(folder), quantization="auto")
