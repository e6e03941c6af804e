from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.kv.cache import SMALL_DTYPES, KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.run.runner import ModelRunner
from common.errors import BlockError, ContextLengthExceeded, InvalidRequest, ModelError
from common.model_files.tiny import make_tiny_model
from kernels.backends import FOUND
from kernels.plain import backend as torch_backend

from ....oracle import Oracle
from ..models.generation import Pool, load, prompt

PROMPTS = [prompt(count, seed=count) for count in (1, 5, 63, 64, 130, 17, 200)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(make_tiny_model(tmp_path_factory.mktemp("model") / request.param, architecture=request.param))


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[list[int]]:
    return [Pool(model).greedy(one, 16) for one in PROMPTS]


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (16, 64), (50, 16), (512, 64)])
def test_a_mixed_batch_changes_nothing(model: Decoder, alone: list[list[int]], chunk: int, block_size: int) -> None:
    assert Pool(model, block_size=block_size).greedy_batch(PROMPTS, 16, chunk=chunk) == alone


@pytest.mark.parametrize("kv_dtype", [None, *SMALL_DTYPES.values()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_in_every_batch(tiny_folder: Path, dtype: str, kv_dtype: torch.dtype | None) -> None:
    from kernels.cpu.build import load_native

    if load_native() is None:
        pytest.skip("only the native kernels promise this")
    pool = Pool(load(tiny_folder, dtype), kv_dtype=kv_dtype)
    tables = [pool.table(len(one)) for one in PROMPTS]
    together = pool.runner.forward([SequenceChunk(one, 0, table) for one, table in zip(PROMPTS, tables, strict=True)])
    for i, one in enumerate(PROMPTS):
        half = len(one) // 2
        table = pool.table(len(one))
        if half:
            pool.runner.forward([SequenceChunk(one[:half], 0, table, False)])
        assert torch.equal(pool.runner.forward([SequenceChunk(one[half:], half, table)])[0], together[i])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_one_sequence_are_the_same_bits_together_and_one_after_the_other(tiny_folder: Path, dtype: str) -> None:
    """What a step that checks draft tokens relies on."""
    from kernels.cpu.build import load_native

    if load_native() is None:
        pytest.skip("only the native kernels promise this")
    one, following = prompt(59), prompt(11, seed=9)
    pools = [Pool(load(tiny_folder, dtype)) for _ in range(2)]
    tables = [pool.table(70) for pool in pools]
    for pool, table in zip(pools, tables, strict=True):
        pool.runner.forward([SequenceChunk(one, 0, table)])
    rows = [[SequenceChunk((token,), 59 + i, table) for i, token in enumerate(following)] for table in tables]
    together = pools[0].runner.forward(rows[0])
    one_by_one = torch.cat([pools[1].runner.forward([row]) for row in rows[1]])
    assert torch.equal(together, one_by_one)
    blocks = [torch.stack([pool.kv.tensor[i] for i in table[:5]]) for pool, table in zip(pools, tables, strict=True)]
    assert torch.equal(blocks[0].nan_to_num(nan=7.0), blocks[1].nan_to_num(nan=7.0))


@pytest.mark.slow_cases("llama-False-*", "gemma3-False-*")
@pytest.mark.parametrize("kv_dtype", SMALL_DTYPES.values())
@pytest.mark.parametrize("native", [True, False])
def test_a_cache_of_8_bits_is_the_plain_loops(
    model: Decoder, native: bool, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the few numbers that lie so near to a border that the last bit of what is rounded decides."""
    if not native:
        monkeypatch.setitem(FOUND, "cpu", torch_backend)
        model.run_by_operation()
    one, pool = prompt(90), Pool(model, kv_dtype=kv_dtype)
    table = pool.table(len(one))
    rows = [pool.runner.forward([SequenceChunk(one[:50], 0, table, all_logits=True)])]
    rows += [pool.runner.forward([SequenceChunk(one[i : i + 1], i, table)]) for i in range(50, 90)]
    expected, exact = (
        oracle.forward(one, oracle.empty_cache()) for oracle in (Oracle(model, kv_dtype=kv_dtype), Oracle(model))
    )
    assert (torch.cat(rows) - expected).norm() < 0.1 * (exact - expected).norm()


def test_shared_prefix_blocks(model: Decoder) -> None:
    pool, one = Pool(model), prompt(100)
    first = pool.table(130)
    expected = pool.greedy(one, 16, table=first)
    second = [*first[:4], *pool.table(70)]
    logits = pool.runner.forward([SequenceChunk(one[64:], 64, second)])
    assert int(logits[0].argmax()) == expected[0]
    assert pool.greedy(one, 16, table=first) == expected


def test_only_sampled_chunks_give_logits(model: Decoder) -> None:
    pool = Pool(model)
    chunks = [SequenceChunk(one, 0, pool.table(len(one)), i % 2 == 0) for i, one in enumerate(PROMPTS[:5])]
    some = pool.runner.forward(chunks)
    every = pool.runner.forward([SequenceChunk(c.token_ids, 0, c.block_table) for c in chunks])
    assert some.shape == (3, model.config.vocab_size) and some.dtype == torch.float32
    torch.testing.assert_close(some, every[::2])


def test_no_sampled_chunk(model: Decoder) -> None:
    pool, one = Pool(model), prompt(40)
    table = pool.table(40)
    assert pool.runner.forward([SequenceChunk(one, 0, table, False)]).shape == (0, model.config.vocab_size)
    expected = Pool(model).greedy(one, 1)
    assert int(pool.runner.forward([SequenceChunk(one[-1:], 39, table)])[0].argmax()) == expected[0]


def test_only_own_slots_are_written(model: Decoder) -> None:
    pool = Pool(model)
    pool.kv.tensor.fill_(7.0)
    pool.runner.forward([SequenceChunk(prompt(20), 0, [3, 5, 9])])
    written = (pool.kv.tensor != 7.0).any(-1).any(-1).any(1).any(1)  # [num_blocks, block_size]
    assert written.nonzero().tolist() == [[3, i] for i in range(16)] + [[5, i] for i in range(4)]


def test_profile(model: Decoder) -> None:
    pool = Pool(model)
    pool.runner.forward([SequenceChunk(prompt(20), 0, pool.table(20)), SequenceChunk([1], 0, pool.table(1))])
    profile = pool.runner.profile
    assert (profile.num_tokens, profile.num_sequences) == (21, 2) and profile.forward_s > 0.0


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (SequenceChunk([1] * 40, 0, [0, 1]), BlockError, "40 tokens require 3 blocks of 16, but the table has 2"),
        (SequenceChunk([1], 32, [0, 1]), BlockError, "33 tokens require 3 blocks"),
        (SequenceChunk([1], 0, [8]), BlockError, "blocks 8 to 8 of a cache of 8"),
        (SequenceChunk([1], 0, [-1]), BlockError, "blocks -1 to -1"),
        (SequenceChunk([], 4, [0]), BlockError, "0 tokens at position 4"),
        (SequenceChunk([1], -1, [0]), BlockError, "at position -1"),
        (SequenceChunk([1, 261], 0, [0]), InvalidRequest, "token id 261 is outside of the vocabulary of 261"),
        (SequenceChunk([-1], 0, [0]), InvalidRequest, "token id -1"),
        (
            SequenceChunk([1], 4096, list(range(300))),
            ContextLengthExceeded,
            "length is 4096 tokens.*4097 in the prompt",
        ),
    ],
)
def test_bad_chunks_write_nothing(model: Decoder, chunk: SequenceChunk, error: type[Exception], message: str) -> None:
    pool = Pool(model, num_blocks=8)
    pool.kv.tensor.fill_(7.0)
    with pytest.raises(error, match=message):
        pool.runner.forward([SequenceChunk([5], 0, [7]), chunk])
    assert bool((pool.kv.tensor == 7.0).all())


def test_no_chunks(model: Decoder) -> None:
    with pytest.raises(BlockError, match="no chunks"):
        Pool(model).runner.forward([])


def test_dtypes_must_agree(model: Decoder) -> None:
    with pytest.raises(ModelError, match="bfloat16: must be the model's torch.float32"):
        ModelRunner(model, KVCache(model.config, 2, 16, "bfloat16"))


def test_bfloat16_is_close(tiny_folder: Path) -> None:
    """Loose: rounding to eight bits moves logits, but not what they mean."""
    one = prompt(100)
    wide, narrow = Pool(load(tiny_folder)), Pool(load(tiny_folder, "bfloat16"))
    logits = [pool.runner.forward([SequenceChunk(one, 0, pool.table(100))])[0] for pool in (wide, narrow)]
    assert float(torch.nn.functional.cosine_similarity(*logits, dim=0)) > 0.99


def test_the_torch_path_gives_the_same_tokens(
    model: Decoder, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FOUND, "cpu", torch_backend)
    assert Pool(model).greedy_batch(PROMPTS, 16, chunk=50) == alone
