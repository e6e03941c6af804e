"""Kinds of models on real vLLM engines: what is decoded from transferred KV equals what one engine generates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.engine.vllm.link import Arrived, Sent

from .engines import Engines, running, write_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]
COMMON: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.25,
    "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA_TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc",
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "shared_expert_intermediate_size": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3": ("Qwen3", {}, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 160, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        {},
    ),
    "deepseek-v3": ("DeepseekV3", {**EXPERTS, **LATENT}, {}),
    "qwen3-next": ("Qwen3Next", {**EXPERTS, **LINEAR}, {"dtype": "bfloat16", "enable_prefix_caching": False}),
    "qwen3-next-cached": ("Qwen3Next", {**EXPERTS, **LINEAR}, {"dtype": "bfloat16", "mamba_cache_mode": "align"}),
}


@pytest.fixture(scope="module", params=MODELS)
def engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engines]:
    kind, fields, given = MODELS[request.param]
    model = write_model(tmp_path_factory.mktemp("model"), kind, {**COMMON, **fields})
    arguments = {"max_num_batched_tokens": 256, **given}  # prompts are computed in chunks
    with running(model, arguments, arguments, 2**28) as engines:
        yield engines


def prompt(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(f"{length} {seed}")
    return [chosen.randrange(2, 500) for _ in range(length)]


def test_tokens_equal_those_of_one_engine(engines: Engines) -> None:
    async def run() -> None:
        for length in (1, 100, 300, 640):
            tokens = prompt(length)
            expected = await engines.d.alone(tokens, 12)
            before = len(engines.d.steps)
            got, sent = await engines.both(f"a{length}", tokens, 12)
            computed = engines.d.num_computed(before)
            assert (got, sent.reason, computed) == (expected, "", 0), length
        for worker in (engines.p, engines.d):
            await worker.check_empty()

    engines.run(run(), 300)


def test_prompts_with_a_common_prefix(engines: Engines) -> None:
    async def run() -> None:
        for number in range(3):
            tokens = prompt(512, 1) + prompt(100, 2 + number)
            assert (await engines.both(f"b{number}", tokens, 12))[0] == await engines.d.alone(tokens, 12)

    engines.run(run(), 300)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 1), (1, 2)])
def test_workers_with_different_numbers_of_ranks(tmp_path: Path, prefill_size: int, decode_size: int) -> None:
    model = write_model(tmp_path, "Llama", COMMON)
    given = ({"tensor_parallel_size": size, "max_num_batched_tokens": 256} for size in (prefill_size, decode_size))

    async def run(engines: Engines) -> None:
        for length in (100, 300, 640):
            name, tokens = f"a{length}", prompt(length)
            num_bytes = -(-length // 128) * 128 * LLAMA_TOKEN_BYTES
            expected = await engines.d.alone(tokens, 12)
            assert (await engines.both(name, tokens, 12))[0] == expected
            sent = [each.num_bytes for each in await engines.p.all_of(name, Sent)]
            arrived = [each.num_bytes for each in await engines.d.all_of(name, Arrived)]
            assert sent == [num_bytes // prefill_size] * prefill_size, "each rank sends the heads that it holds"
            assert arrived == [num_bytes // decode_size] * decode_size

    with running(model, *given, 2**28) as engines:
        engines.run(run(engines), 300)
