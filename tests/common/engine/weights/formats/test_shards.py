"""Ranks of quantised checkpoints and GGUF files: each holds its part of the same integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.models.load import load_model, open_model
from common.engine.models.mlp import MLP
from common.engine.ranks.shard import ShardedSource, load_shard
from common.errors import ConfigError
from common.model_files.architecture.shard import Shard
from common.model_files.quantization import Quantization
from common.model_files.resolve import resolve_model

from ...models.generation import Pool, files_of, prompt, random_checkpoint
from ...models.threaded_ranks import Sums, greedy_of_ranks
from .checkpoints import FORMATS, write_checkpoint

WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in one format, of sizes that two ranks share in whole groups."""
    root = tmp_path_factory.mktemp("shards")
    plain = random_checkpoint(root / "plain", "Llama", **WIDTHS, num_key_value_heads=2)
    write_checkpoint(plain, folder := root / str(request.param), FORMATS[request.param])
    return folder


@pytest.mark.slow_except("w8a8 by channel", "fp8 by block")
def test_the_tokens_are_those_of_one_rank(checkpoint: Path) -> None:
    files = files_of(checkpoint)
    for quantization in ("none", "auto"):
        expected = Pool(load_model(files, quantization=quantization)).greedy(prompt(40), 10, chunk=16)
        assert greedy_of_ranks(files, 2, prompt(40), 10, quantization) == [expected] * 2


@pytest.mark.slow_except("gptq int4 with zero points", "awq", "w8a8 by channel", "fp8 by block")
def test_ranks_hold_parts_of_the_same_matrices(checkpoint: Path) -> None:
    """Down's columns and gate's rows, in as many bits as one rank holds them in."""
    files = files_of(checkpoint)
    whole = load_model(files, quantization="auto")
    parts = [
        load_shard(files, Shard(rank, 2), Sums(), dtype="float32", device="cpu", quantization="auto")
        for rank in range(2)
    ]
    mlps = [one.weights.layers[0].mlp for one in (whole, *parts)]
    assert all(isinstance(mlp, MLP) for mlp in mlps)
    (down, *downs), (gate_up, *gate_ups) = ([mlp.down for mlp in mlps], [mlp.gate_up for mlp in mlps])
    assert torch.equal(torch.cat([one.weight for one in downs], 1), down.weight)
    gates, ups = (torch.cat([one.weight.chunk(2)[half] for one in gate_ups]) for half in range(2))
    assert torch.equal(torch.cat((gates, ups)), gate_up.weight)
    if down.native is not None:
        assert all(one.native is not None for one in downs)
        assert sum(one.native.num_bytes for one in downs) <= 1.1 * down.native.num_bytes


@pytest.mark.parametrize("name", ["awq", "w8a8 by channel", "fp8 by tensor"])
def test_groups_that_ranks_would_cut_are_refused_where_integers_are_kept(tmp_path: Path, name: str) -> None:
    plain = random_checkpoint(tmp_path / "plain", "Llama", **WIDTHS | {"intermediate_size": 96}, num_key_value_heads=2)
    write_checkpoint(plain, tmp_path / "held", FORMATS[name])
    files, shard = files_of(tmp_path / "held"), Shard(1, 2)
    with pytest.raises(ConfigError) as refused:
        load_shard(files, shard, Sums(), dtype="float32", device="cpu", quantization="auto")
    assert str(refused.value) == (
        "invalid tensor_parallel_size=2: must be a number of ranks that divides the 96 inputs of "
        "model.layers.0.mlp.down_proj.weight into whole groups of 32; or --quantization none"
    )
    config, source = open_model(files)
    as_on_gpus = ShardedSource(source, config, shard, Quantization.NONE)
    assert as_on_gpus.read_quantised("model.layers.0.mlp.down_proj.weight", floats=True) is None, "it is read as floats"
    assert as_on_gpus.read_quantised("model.layers.0.mlp.up_proj.weight", floats=True) is not None
    expected = Pool(load_model(files)).greedy(prompt(40), 10)
    assert greedy_of_ranks(files, 2, prompt(40), 10) == [expected] * 2


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_floats_are_rounded_in_the_groups_of_one_rank(tmp_path: Path, quantization: str) -> None:
    files = files_of(random_checkpoint(tmp_path / "whole", "Llama", **WIDTHS, num_key_value_heads=2))
    expected = Pool(load_model(files, quantization=quantization)).greedy(prompt(40), 10, chunk=16)
    assert greedy_of_ranks(files, 2, prompt(40), 10, quantization) == [expected] * 2
    odd = files_of(random_checkpoint(tmp_path / "odd", "Llama", **WIDTHS | {"intermediate_size": 352}))
    with pytest.raises(ConfigError, match="the 352 inputs of .* into whole groups of 32"):
        load_shard(odd, Shard(1, 2), Sums(), dtype="float32", device="cpu", quantization=quantization)


@pytest.mark.slow
def test_parts_of_a_gguf_file_are_its_matrices() -> None:
    """Q4_K, Q5_0, Q6_K and Q8_0; the rows of two parts below each other, or their columns side by side."""
    config, source = open_model(resolve_model("gemma3-270m"))
    shards = [ShardedSource(source, config, Shard(rank, 2), Quantization.AUTO) for rank in range(2)]
    for name, dim in (("self_attn.q_proj", 0), ("mlp.up_proj", 0), ("mlp.down_proj", 1), ("self_attn.o_proj", 1)):
        for layer in (0, 9):
            full = f"model.layers.{layer}.{name}.weight"
            whole = source.read_quantised(full)
            parts = [shard.read_quantised(full) for shard in shards]
            assert whole is not None
            held = torch.cat([part.dense(torch.float32) for part in parts if part is not None], dim)
            assert torch.equal(held, whole.dense(torch.float32))
            assert torch.equal(held, torch.cat([shard.read(full) for shard in shards], dim))
    name = "model.embed_tokens.weight"
    assert torch.equal(torch.cat([shard.read(name) for shard in shards]), source.read(name))


@pytest.mark.slow
def test_a_published_file_answers_over_three_ranks_as_over_one() -> None:
    """9 heads, 3 KV heads: llama.cpp's order of rows is undone before they are parted."""
    files = resolve_model("smollm2-135m")
    for quantization in ("none", "auto"):
        expected = Pool(load_model(files, quantization=quantization)).greedy(prompt(20), 6)
        assert greedy_of_ranks(files, 3, prompt(20), 6, quantization) == [expected] * 3
