"""The first promise: what comes out of two pools is what one plain forward loop gives, token for token, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

LENGTHS = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 63, 64, 65, 66, 79, 80, 81, 95, 96, 97, 111, 112),
    *(113, 127, 128, 129, 130, 143, 144, 145, 191, 192, 193, 255, 256, 257, 300, 383, 384, 385, 500, 511, 512, 513),
    *(600, 640, 700, 767, 768, 769, 900, 1000, 1023, 1024, 1025, 1200, 1400, 1500, 1700, 1900, 1999, 2000),
)
"""68 prompt lengths from 1 to 2,000 tokens, most of them around block and chunk borders."""
SHORT_LENGTHS = (
    *(1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129),
    *(255, 256, 257, 511, 512, 513, 1025, 2000),
)
"""What the quick run sends."""
NUM_TOKENS = 12
VOCAB = {"tiny-random": 256, "smollm2-135m": 49_000, "gemma3-270m": 200_000}
ALL_REMOTE = ("--local-prefill-threshold", "0")
CONTENT_TO_WAIT = (*ALL_REMOTE, "--max-wait-s", "900", "--overload-wait-s", "900", "--queue-timeout-s", "900")


class Case:
    """Prompts and what `transformers` generates for them, made once per model."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.prompts, self.answers = prompts, answers

    def check(self, got: Sequence[list[int]]) -> None:
        wrong = [
            f"prompt of {len(prompt)} tokens: {tokens} instead of {answer}"
            for prompt, tokens, answer in zip(self.prompts, got, self.answers, strict=True)
            if tokens != answer
        ]
        assert not wrong, f"{len(wrong)} of {len(self.prompts)} differ\n" + "\n".join(wrong[:5])


@pytest.fixture(scope="session")
def tiny_case(tiny_oracle: Any, random_prompts: Callable[..., list[list[int]]]) -> Case:
    prompts = random_prompts(LENGTHS, vocab_size=VOCAB["tiny-random"], seed=1)
    return Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])


@pytest.fixture(scope="session")
def short_case(tiny_oracle: Any, random_prompts: Callable[..., list[list[int]]]) -> Case:
    """Every length around a block border, and one for each larger border of chunks and batches."""
    prompts = random_prompts(SHORT_LENGTHS, vocab_size=VOCAB["tiny-random"], seed=1)
    return Case(prompts, [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts])


def slowly(*values: Any) -> Any:
    """A case of which the quick run has a sibling."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "block_size"), [(16, 64), (64, 16), (512, 64), slowly(16, 16), slowly(64, 64), slowly(512, 16)]
)
def test_every_chunk_and_block_size(system_of: Any, tiny_case: Case, chunk: int, block_size: int) -> None:
    system = system_of(
        worker_flags=("--block-size", str(block_size)),
        prefill_flags=("--max-num-batched-tokens", str(chunk)),
        router_flags=ALL_REMOTE,
    )
    tiny_case.check(system.generate(tiny_case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    # Again: now every full block is cached on both workers.
    tiny_case.check(system.generate(tiny_case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    assert system.metric("diptych_kv_blocks_skipped", "decode") > 0


@pytest.mark.slow
def test_one_by_one(system_of: Any, tiny_case: Case) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    tiny_case.check(system.generate(tiny_case.prompts, max_tokens=NUM_TOKENS, at_once=1))


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        pytest.param((), "shm", marks=pytest.mark.slow),
        pytest.param(("--kv-streams", "3"), "shm", marks=pytest.mark.slow),
        (("--kv-streams", "3", "--kv-transport", "tcp"), "tcp"),
    ],
)
def test_two_by_two(system_of: Any, short_case: Case, flags: tuple[str, ...], transport: str) -> None:
    """`test_every_chunk_and_block_size` sends every length."""
    system = system_of(2, 2, prefill_flags=flags, router_flags=ALL_REMOTE)
    short_case.check(system.generate(short_case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    assert system.transfers(transport) > 0
    assert system.transfers("tcp" if transport == "shm" else "shm") == 0
    for worker in system.stack.workers():
        assert system.requests_of(worker) > 0, f"{worker.name} got nothing"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 128])
def test_without_a_prefill_worker(system_of: Any, tiny_case: Case, chunk: int) -> None:
    system = system_of(0, 1, decode_flags=("--local-prefill-chunk", str(chunk)))
    tiny_case.check(system.generate(tiny_case.prompts, max_tokens=NUM_TOKENS, at_once=32))
    tiny_case.check(system.generate(tiny_case.prompts, max_tokens=NUM_TOKENS, at_once=32))


def test_prefix_on_the_prefill_worker_only(system_of: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    prompts = random_prompts((15, 16, 17, 32, 100, 160), vocab_size=256, seed=2)
    system.generate(prompts, max_tokens=1)  # one token is the prefill worker's alone
    hits = system.metric("vllm:prefix_cache_hits", "prefill")
    got = system.generate(prompts, max_tokens=NUM_TOKENS)
    assert got == [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert system.metric("vllm:prefix_cache_hits", "prefill") - hits == 16 + 16 + 96 + 144


@pytest.mark.slow
def test_prefix_on_the_decode_worker_only(system_of: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=("--local-prefill-threshold", "64"))
    heads = random_prompts((48, 63, 64), vocab_size=256, seed=3)
    system.generate(heads, max_tokens=2)  # short: prefilled by the decode worker itself
    tails = random_prompts((80, 81, 96), vocab_size=256, seed=4)
    prompts = [head + tail for head, tail in zip(heads, tails, strict=True)]
    skipped = system.metric("diptych_kv_blocks_skipped", "decode")
    got = system.generate(prompts, max_tokens=NUM_TOKENS)
    assert got == [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert system.metric("diptych_kv_blocks_skipped", "decode") - skipped == 3 + 3 + 4


@pytest.mark.parametrize(
    "length",
    [
        31,
        32,
        33,
        pytest.param(47, marks=pytest.mark.slow),
        pytest.param(48, marks=pytest.mark.slow),
        pytest.param(49, marks=pytest.mark.slow),
    ],
)
def test_full_and_partial_hits_around_a_border(
    system_of: Any, tiny_oracle: Any, random_prompts: Any, length: int
) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    (prompt,) = random_prompts((length,), vocab_size=256, seed=100 + length)
    for cut in (length, length, length - 1, length - 16):
        (got,) = system.generate([prompt[:cut]], max_tokens=NUM_TOKENS)
        assert got == tiny_oracle.greedy(prompt[:cut], NUM_TOKENS)


def test_the_next_turn_hits_what_was_generated(system_of: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    (prompt,) = random_prompts((70,), vocab_size=256, seed=5)
    (answer,) = system.generate([prompt], max_tokens=60)
    skipped = system.metric("diptych_kv_blocks_skipped", "decode")
    turn = prompt + answer + [10, 11, 12]
    (got,) = system.generate([turn], max_tokens=NUM_TOKENS)
    assert got == tiny_oracle.greedy(turn, NUM_TOKENS)
    # 70 + 60 tokens; the KV of the last one was never computed: 129 tokens fill 8 blocks.
    assert system.metric("diptych_kv_blocks_skipped", "decode") - skipped == 8


@pytest.mark.slow
def test_preempted_sequences(system_of: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    system = system_of(
        router_flags=ALL_REMOTE, decode_flags=("--num-blocks", "24", "--watermark", "0"), prefill_flags=()
    )
    prompts = random_prompts((40,) * 8, vocab_size=256, seed=6)
    got = system.generate(prompts, max_tokens=80)
    assert got == [tiny_oracle.greedy(prompt, 80) for prompt in prompts]
    assert system.metric("vllm:num_preemptions", "decode") > 0


@pytest.mark.slow
def test_first_token_ends_it(system_of: Any, tiny_oracle: Any, random_prompts: Any) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    (prompt,) = random_prompts((100,), vocab_size=256, seed=7)
    (first, second) = tiny_oracle.greedy(prompt, 2)
    assert system.generate([prompt], max_tokens=1) == [[first]]
    assert system.generate([prompt], max_tokens=9, stop_token_ids=[first])[0] in ([first], [])
    assert system.generate([prompt], max_tokens=9, stop_token_ids=[second], min_tokens=1)[0] in (
        [first, second],
        [first],
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "shape"), [("smollm2-135m", (1, 1)), slowly("smollm2-135m", (0, 1)), slowly("gemma3-270m", (1, 1))]
)
def test_real_models(system_of: Any, real_oracle: Any, random_prompts: Any, model: str, shape: tuple[int, int]) -> None:
    system = system_of(*shape, model=model, router_flags=ALL_REMOTE, worker_flags=("--kv-memory-gib", "0.5"))
    prompts = random_prompts((1, 5, 16, 33, 100, 257, 400), vocab_size=VOCAB[model], seed=8)
    got = system.generate(prompts, max_tokens=NUM_TOKENS)
    assert got == [real_oracle(model).greedy(prompt, NUM_TOKENS) for prompt in prompts]
    copied = [prompt * 4 for prompt in random_prompts((12, 25), vocab_size=VOCAB[model], seed=11)]
    answers = [real_oracle(model).greedy(prompt, 32) for prompt in copied]
    assert system.generate(copied, max_tokens=32, at_once=1) == answers
    assert system.metric("vllm:spec_decode_num_accepted_tokens", "decode") > 0  # what is said again is drafted


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_real_models_whole_matrix(system_of: Any, real_oracle: Any, random_prompts: Any, model: str) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=VOCAB[model], seed=9)
    case = Case(prompts, [real_oracle(model).greedy(prompt, NUM_TOKENS) for prompt in prompts])
    memory = ("--kv-memory-gib", "1.5")
    for shape in ((1, 1), (2, 2), (0, 1)):
        system = system_of(*shape, model=model, router_flags=CONTENT_TO_WAIT, worker_flags=memory)
        case.check(system.generate(prompts, max_tokens=NUM_TOKENS, at_once=32))
        case.check(system.generate(prompts, max_tokens=NUM_TOKENS, at_once=32))
    order = random.Random(10)
    for chunk, block_size in ((16, 64), (64, 16), (512, 64)):
        system = system_of(
            model=model,
            router_flags=CONTENT_TO_WAIT,
            worker_flags=(*memory, "--block-size", str(block_size)),
            prefill_flags=("--max-num-batched-tokens", str(chunk)),
        )
        some = sorted(order.sample(range(len(prompts)), 24))
        part = Case([prompts[i] for i in some], [case.answers[i] for i in some])
        part.check(system.generate(part.prompts, max_tokens=NUM_TOKENS, at_once=32))
    system = system_of(model=model, router_flags=CONTENT_TO_WAIT, worker_flags=memory)
    case.check(system.generate(prompts, max_tokens=NUM_TOKENS, at_once=1))
