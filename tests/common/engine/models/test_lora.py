"""Adapters in a decoder: the tokens of the merged model in transformers, and no bit of others changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.adapters.bank import AdapterBank
from common.engine.adapters.slots import AdapterSlots
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner

from ....adapters import ALL, ATTENTION, make_adapter, merge
from ....families import CASES
from .generation import Pool, files_of, load, prompt, random_checkpoint, transformers_greedy, transformers_model

FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {}, ALL),
    "odd": ("Llama", {"hidden_size": 84, "intermediate_size": 130, "head_dim": 14}, ALL),
    "gemma2": (*CASES["gemma2"], ALL),
    "phi3": (*CASES["phi3"], FUSED),
    "phi4-mini": (*CASES["phi4-mini"], FUSED),
    "qwen3-moe": (*CASES["qwen3-moe"], ATTENTION),
}


class AdaptedPool(Pool):
    """A pool whose chunks use the adapter in a place."""

    def greedy_with(self, place: int, token_ids: list[int], count: int, *, chunk: int) -> list[int]:
        tokens, done, table = list(token_ids), 0, self.table(len(token_ids) + count)
        while len(tokens) < len(token_ids) + count:
            part = tokens[done : done + chunk]
            last = done + len(part) == len(tokens)
            logits = self.runner.forward([SequenceChunk(part, done, table, last, adapter=place)])
            done += len(part)
            if last:
                tokens.append(int(logits[0].argmax()))
        return tokens[len(token_ids) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_the_merged_model_in_transformers(tmp_path: Path, name: str) -> None:
    family, options, modules = FAMILIES[name]
    base = random_checkpoint(tmp_path / "base", family, **options)
    fields = {"rank_pattern": {"o_proj": 7}, "alpha_pattern": {"o_proj": 3.0}, "use_rslora": True}
    adapter = make_adapter(tmp_path / "adapter", base, modules=modules, rank=5, **fields)
    merged = transformers_model(merge(tmp_path / "merged", base, adapter))
    expected, _ = transformers_greedy(merged, prompt(90), 16)
    plain, _ = transformers_greedy(transformers_model(base), prompt(90), 16)
    assert plain != expected, "the adapter changes too little for a test"
    model = load(base)
    bank = AdapterBank(AdapterSlots(model, max_loras=3, max_rank=8))
    place = bank.load("a", str(adapter)).place
    for by_operation in (False, True):
        if by_operation:
            model.run_by_operation()
        for chunk in (512, 16):
            assert AdaptedPool(model).greedy_with(place, prompt(90), 16, chunk=chunk) == expected
        assert Pool(model).greedy(prompt(90), 16) == plain


def mixed_steps(runner: ModelRunner, adapters: list[int]) -> list[Tensor]:
    """Logits of each sequence, all in one batch: a prompt of 40 tokens in two chunks, then four tokens."""
    tables = [range(4 * i, 4 * i + 4) for i in range(len(adapters))]
    tokens = [[(7 * i + 3 * j) % 250 for j in range(44)] for i in range(len(adapters))]
    parts = [(0, 23), (23, 40), *((i, i + 1) for i in range(40, 44))]
    steps = []
    for begin, end in parts:
        chunks = [
            SequenceChunk(tokens[i][begin:end], begin, tables[i], adapter=place) for i, place in enumerate(adapters)
        ]
        steps.append(runner.forward(chunks).clone())
    return list(torch.stack(steps, 1))


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("False-bfloat16-none")
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int4")]
)
@pytest.mark.parametrize("by_operation", [False, True])
def test_a_row_does_not_depend_on_the_adapters_of_others(
    tmp_path: Path, tiny_folder: Path, dtype: str, quantization: str, by_operation: bool
) -> None:
    model: Decoder = load_model(files_of(tiny_folder), dtype=dtype, quantization=quantization)
    bank = AdapterBank(AdapterSlots(model, max_loras=4, max_rank=16))
    places = [-1]
    for seed, rank in ((1, 3), (2, 16)):
        folder = make_adapter(tmp_path / str(seed), tiny_folder, seed=seed, rank=rank, layers=[0, 3][: seed + 1])
        places.append(bank.load(str(seed), str(folder)).place)
    if by_operation:
        model.run_by_operation()
    runner = ModelRunner(model, KVCache(model.config, 24, 16, model.dtype))
    adapters = [places[i] for i in (0, 1, 2, 0, 2, 1)]
    together = mixed_steps(runner, adapters)
    base = mixed_steps(runner, [-1] * 6)
    for i, place in enumerate(adapters):
        alone = mixed_steps(runner, [place if j == i else -1 for j in range(6)])[i]
        assert torch.equal(together[i], alone)
        assert torch.equal(together[i], base[i]) == (place < 0)


def test_a_freed_place_changes_nothing_of_its_next_adapter(tmp_path: Path, tiny_folder: Path) -> None:
    first = make_adapter(tmp_path / "1", tiny_folder, seed=1, rank=8)
    second = make_adapter(tmp_path / "2", tiny_folder, seed=2, rank=2, modules=ATTENTION, layers=[1])
    model = load(tiny_folder)
    bank = AdapterBank(AdapterSlots(model, max_loras=1, max_rank=8))
    held = bank.load("first", str(first))
    bank.retire(held.digest)
    assert not bank.free({held.digest}) and bank.place(held.digest) == 0
    assert bank.free(()) and bank.place(held.digest) is None
    place = bank.load("second", str(second)).place
    other = load(tiny_folder)
    AdapterBank(AdapterSlots(other, max_loras=1, max_rank=8)).load("second", str(second))
    logits = [
        ModelRunner(each, KVCache(each.config, 4, 16, each.dtype)).forward(
            [SequenceChunk(range(20), 0, range(2), adapter=place)]
        )
        for each in (model, other)
    ]
    assert torch.equal(*logits)
