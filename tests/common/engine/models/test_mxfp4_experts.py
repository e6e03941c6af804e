"""gpt-oss as it is published, beside transformers and the same numbers in float32."""

from __future__ import annotations

from pathlib import Path

import torch

from common.engine.models.load import open_model
from common.engine.ranks.shard import ShardedSource
from common.model_files.architecture.shard import Shard
from common.model_files.quantization import Quantization
from kernels import quantise

from .generation import Pool, files_of, load, prompt, transformers_greedy, transformers_model
from .mxfp4_checkpoint import write_mxfp4


def test_tokens_equal_those_of_the_dense_model(tmp_path: Path) -> None:
    dense, held = write_mxfp4(tmp_path)
    tokens, _ = transformers_greedy(transformers_model(dense), prompt(60), 20)
    assert len(set(tokens)) > 4
    assert Pool(load(held)).greedy(prompt(60), 20, chunk=16) == tokens


def test_eight_bits_of_a_cpu_hold_every_expert_exactly(tmp_path: Path) -> None:
    _, source = open_model(files_of(write_mxfp4(tmp_path)[1]))
    for name in ("gate_up_proj", "down_proj"):
        for expert in source.read(f"model.layers.1.mlp.experts.{name}"):
            made = quantise(expert, 8)
            assert made is not None
            assert torch.equal(made.dense(torch.float32), expert)


def test_ranks_read_their_part_of_every_expert(tmp_path: Path) -> None:
    """Of inputs whole groups; where that cannot be, they are read as floats."""
    dense, held = write_mxfp4(tmp_path, intermediate_size=128)
    config, source = open_model(files_of(held))
    _, floats = open_model(files_of(dense))
    assert config.experts is not None
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        full, stacks = f"model.layers.1.mlp.experts.{name}", []
        for rank in range(2):
            found = ShardedSource(source, config, Shard(rank, 2), Quantization.NONE).read_quantised(full, floats=True)
            assert found is not None
            stacks.append(torch.stack([one.dense(torch.float32) for one in found.parted(config.experts.count)]))
        assert torch.equal(torch.cat(stacks, dim), floats.read(full).transpose(1, 2))
    third = ShardedSource(source, config, Shard(0, 3), Quantization.NONE)
    assert third.read_quantised("model.layers.1.mlp.experts.down_proj", floats=True) is None
