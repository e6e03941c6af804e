"""A model whose layers all see through a window, in real processes: the tokens of transformers in less memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from common.blocks.window import Window
from common.model_files.resolve import resolve_model

from ..common.engine.models.generation import random_checkpoint, transformers_model
from ..rig import samples, wait_until
from .conftest import Oracle
from .test_failures import ALL_REMOTE, run_with
from .test_handover import LONG, come_back, handovers, leave, under_load
from .test_tiers import hits, used

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]
WINDOW, BLOCK = 40, 16
LENGTHS = (20, 41, 66, 97, 210, 330)
NUM_TOKENS = 70
IN_CHUNKS = ("--max-num-batched-tokens", "48")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Mistral 7B v0.1, but tiny, and with a window that most prompts exceed."""
    made = random_checkpoint(tmp_path_factory.mktemp("models") / "mistral", "Mistral", sliding_window=WINDOW)
    for file in resolve_model("tiny-random").tokenizer.parent.glob("tokenizer*.json"):
        shutil.copy(file, made)
    return made


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(transformers_model(folder))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tokens_equal_transformers_in_few_blocks(
    system_of: Any, random_prompts: Any, folder: Path, oracle: Oracle, transport: str
) -> None:
    """The longest prompt has more blocks than either worker. Twice, so that prefixes are cached on both sides."""
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=31)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    system = system_of(
        model=str(folder),
        router_flags=ALL_REMOTE,
        worker_flags=("--kv-transport", transport),
        prefill_flags=("--num-blocks", "18", "--kv-streams", "3", *IN_CHUNKS),
        decode_flags=("--num-blocks", "9", "--watermark", "0"),
    )
    for _ in range(2):
        assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
    assert system.transfers(transport) == 2 * len(prompts)
    assert system.metric("vllm:num_preemptions", "decode") > 0
    window, (worker,) = Window(WINDOW, BLOCK), system.stack.workers("decode")
    most = sum(-(-length // BLOCK) - window.first_block(length) for length in LENGTHS)
    block_bytes = 3 * 2 * BLOCK * 2 * 16 * 4  # layers, KV heads, slots, K and V, head size, float32
    assert sum(samples(worker, "diptych_kv_transfer_bytes")) <= 2 * most * block_bytes


def test_a_next_turn_hits_behind_blocks_that_are_gone(
    system_of: Any, random_prompts: Any, folder: Path, oracle: Oracle
) -> None:
    """Of the first turn a worker keeps the last blocks alone: others have taken the rest of its memory since."""
    system = system_of(
        model=str(folder),
        router_flags=ALL_REMOTE,
        prefill_flags=("--num-blocks", "18", *IN_CHUNKS),
        decode_flags=("--num-blocks", "24"),
    )
    (first,) = random_prompts((330,), vocab_size=256, seed=33)
    (answer,) = system.generate([first], max_tokens=NUM_TOKENS)
    assert answer == oracle.greedy(first, NUM_TOKENS)
    (end,) = random_prompts((30,), vocab_size=256, seed=34)
    assert system.generate([first + end], max_tokens=NUM_TOKENS) == [oracle.greedy(first + end, NUM_TOKENS)]
    assert system.bodies[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 330 // BLOCK * BLOCK


def test_a_killed_decode_worker_costs_no_token(
    system_of: Any, random_prompts: Any, folder: Path, oracle: Oracle
) -> None:
    system = system_of(1, 2, model=str(folder), router_flags=ALL_REMOTE, prefill_flags=IN_CHUNKS)
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=35)
    expected = system.generate(prompts, max_tokens=400)
    assert expected[4][:NUM_TOKENS] == oracle.greedy(prompts[4], NUM_TOKENS)
    victim = system.stack.workers("decode")[0]
    assert run_with(system, prompts, victim, victim.kill, cache_salt="killed") == expected
    system.stack.restart(victim)
    system.wait_for_workers()


def test_a_decode_worker_that_ends_hands_its_streams_over(system_of: Any, random_prompts: Any, folder: Path) -> None:
    flags = ("--drain-timeout-s", "60", "--kv-transport", "tcp")
    system = system_of(1, 2, model=str(folder), router_flags=ALL_REMOTE, worker_flags=flags, prefill_flags=IN_CHUNKS)
    victim = system.stack.workers("decode")[0]
    with under_load(system, random_prompts((30, 100, 350), vocab_size=256, seed=36), LONG) as load:
        load.wait_for_streams(4)
        leave(victim)
    assert handovers(system) > 0
    come_back(system, victim)


def test_a_killed_prefill_worker_reads_prefixes_from_disk(
    system_of: Any, random_prompts: Any, folder: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """Forwards, in as few blocks as it would compute them in, a read after the other."""
    disk = ("--kv-disk-path", str(tmp_path / "blocks"), "--kv-disk-gib", "0.05")
    system = system_of(
        model=str(folder), router_flags=ALL_REMOTE, prefill_flags=("--num-blocks", "64", *IN_CHUNKS, *disk)
    )
    prompts = random_prompts((330, 97), vocab_size=256, seed=37)
    expected = [oracle.greedy(prompt, 8) for prompt in prompts]
    assert system.generate(prompts, at_once=1, max_tokens=8) == expected
    (worker,) = system.stack.workers("prefill")
    num_blocks = sum(len(prompt) // BLOCK for prompt in prompts)
    wait_until(lambda: used(worker) == num_blocks, "every full block is in the file")
    worker.kill()
    system.stack.restart(worker)
    system.wait_for_workers()
    wait_until(lambda: used(worker) == num_blocks, "every full block was found again")
    assert system.generate(prompts, at_once=1, max_tokens=8) == expected
    assert hits(worker, "disk") > num_blocks * BLOCK // 2  # where computing is not faster
