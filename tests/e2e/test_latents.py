"""DeepSeek's latents through two pools: the tokens of transformers, whatever moves, and nothing else on the wire."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from common.model_files.resolve import resolve_model

from ..common.engine.models.generation import load, random_checkpoint, transformers_model
from ..families import CASES
from .conftest import Oracle
from .test_failures import ALL_REMOTE, NUM_TOKENS, SLOW_PREFILL, random_order, run_with
from .test_handover import LONG, come_back, flags, handovers, leave, under_load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]
LENGTHS = (5, 16, 33, 100, 250)
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V3 with YaRN, and the tokenizer of the tiny model."""
    family, options = CASES["deepseek-v3"]
    made = random_checkpoint(tmp_path_factory.mktemp("latents") / "v3", family, **options)
    for file in resolve_model("tiny-random").tokenizer.parent.glob("tokenizer*.json"):
        shutil.copy(file, made)
    return made


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_a_block_is_its_latents(system_of: Any, random_prompts: Any, folder: Path, transport: str) -> None:
    """48 numbers a token and layer, one row for all heads; prefixes are found again in both caches."""
    oracle, config = Oracle(transformers_model(folder)), load(folder).config
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=41)
    expected = [oracle.greedy(prompt, 20) for prompt in prompts]
    system = system_of(model=str(folder), router_flags=ALL_REMOTE, worker_flags=("--kv-transport", transport))
    assert system.generate(prompts, max_tokens=20, at_once=1) == expected
    num_slots = BLOCK_SIZE * sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    assert system.metric("diptych_kv_transfer_bytes", "decode") == num_slots * config.num_layers * 48 * 4
    assert system.generate(prompts, max_tokens=20) == expected
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0
    assert system.metric("diptych_kv_blocks_skipped", "decode") > 0
    assert system.transfers(transport) == 2 * len(prompts)


@pytest.mark.parametrize(("role", "transport"), [("prefill", "tcp"), ("decode", "shm")])
@pytest.mark.slow
def test_a_killed_worker_costs_no_token(
    system_of: Any, random_prompts: Any, folder: Path, role: str, transport: str
) -> None:
    system = system_of(
        *(2, 2),
        model=str(folder),
        router_flags=ALL_REMOTE,
        worker_flags=("--kv-transport", transport),
        prefill_flags=SLOW_PREFILL,
    )
    prompts = random_prompts((30, 200, 700, 1500) * 3, vocab_size=256, seed=42)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers(role)[0]
    got = run_with(system, random_order(prompts), victim, victim.kill, cache_salt=role)
    system.stack.restart(victim)
    assert got == random_order(expected)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_streams_are_handed_over(system_of: Any, random_prompts: Any, folder: Path, transport: str) -> None:
    system = system_of(2, 2, model=str(folder), **flags(transport))
    victim = system.stack.workers("decode")[0]
    prompts = random_prompts((30, 100, 200, 350), vocab_size=256, seed=43)
    with under_load(system, prompts, LONG) as load_of:  # on a busy machine short ones end before they can move
        load_of.wait_for_streams(6)
        leave(victim)
    assert handovers(system) > 0
    come_back(system, victim)


@pytest.mark.slow
def test_blocks_in_8_bits(system_of: Any, random_prompts: Any, folder: Path) -> None:
    """They arrive, one byte a number and a scale for each layer; the first token is exact."""
    oracle, config = Oracle(transformers_model(folder)), load(folder).config
    prompts = random_prompts((100, 250), vocab_size=256, seed=44)
    system = system_of(
        model=str(folder),
        router_flags=ALL_REMOTE,
        worker_flags=("--kv-transport", "tcp"),
        prefill_flags=("--kv-wire-dtype", "fp8"),
    )
    got = system.generate(prompts, max_tokens=6, at_once=1)
    assert [tokens[0] for tokens in got] == [oracle.greedy(prompt, 1)[0] for prompt in prompts]
    size = config.num_layers * (BLOCK_SIZE * 48 + 4)
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)
    assert system.metric("diptych_kv_transfer_bytes", "decode") == num_blocks * (-(-size // 16) * 16)
