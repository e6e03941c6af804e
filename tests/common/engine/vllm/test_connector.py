"""KV of real vLLM engines: what is prefilled on one and decoded on another equals what one engine generates."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from common.engine.vllm.link import Arrived, Cancel, Expect, Forget, Load, Send, Sent, TransferParams
from common.wire.messages import KVTarget

from .engines import GRAMMAR, PATTERN, Engines, running, text_of, write_llama, write_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]
BLOCK = 128
BLOCK_BYTES = 3 * BLOCK * 2 * 64 * 4
NUM_SLOTS = 40
FEW_BLOCKS = {"num_gpu_blocks_override": 33, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = write_llama(tmp_path_factory.mktemp("model"))
    write_tokenizer(model)
    prefill = {"max_num_batched_tokens": 192, **FEW_BLOCKS}  # prompts are computed in chunks
    decode = {"max_num_batched_tokens": 2048, **FEW_BLOCKS}
    with running(model, prefill, decode, NUM_SLOTS * BLOCK_BYTES) as engines:
        yield engines


def prompt(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(f"{length} {seed}")
    return [chosen.randrange(2, 500) for _ in range(length)]


@pytest.fixture(autouse=True)
def nothing_is_left(engines: Engines) -> Iterator[None]:
    yield

    async def check() -> None:
        await engines.p.check_empty()
        await engines.d.check_empty()

    engines.run(check())


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 512])
def test_tokens_equal_those_of_one_engine(engines: Engines, length: int) -> None:
    async def run() -> None:
        tokens = prompt(length)
        expected = await engines.d.alone(tokens, 20)
        before = len(engines.d.steps)
        got, sent = await engines.both(f"a{length}", tokens, 20)
        assert got == expected and (sent.reason, sent.transport) == ("", "shm")
        assert sent.num_bytes == -(-length // BLOCK) * BLOCK_BYTES
        assert engines.d.num_computed(before) == 0, "nothing was computed again"

    engines.run(run())


def test_a_grammar_continues_after_the_first_token(engines: Engines) -> None:
    async def run() -> None:
        tokens = prompt(300, 7)
        expected = await engines.d.alone(tokens, 20, GRAMMAR)
        got, _ = await engines.both("grammar", tokens, 20, grammar=GRAMMAR)
        assert got == expected and re.fullmatch(PATTERN, text_of(got))

    engines.run(run())


def test_many_at_once_with_few_blocks_and_slots(engines: Engines) -> None:
    async def run() -> None:
        prompts = [prompt(200 + 37 * number, number) for number in range(16)]
        expected = [await engines.d.alone(tokens, 150) for tokens in prompts]
        results = await asyncio.gather(*(engines.both(f"m{i}", tokens, 150) for i, tokens in enumerate(prompts)))
        assert [got for got, _ in results] == expected

    engines.run(run(), 300)


def test_cached_prefixes_are_not_sent(engines: Engines) -> None:
    async def run() -> None:
        base = prompt(512, 1)
        for number, length in enumerate((100, 128, 5)):
            tokens = base + prompt(length, 2)
            expected = await engines.d.alone(tokens, 16)
            got, sent = await engines.both(f"h{number}", tokens, 16, first_block=4 if number else 0)
            assert got == expected and sent.num_skipped == (4 if number else 0)

    engines.run(run())


def test_a_prefix_that_is_no_longer_cached_is_computed(engines: Engines) -> None:
    async def run() -> None:
        tokens = prompt(400, 3)
        expected = await engines.d.alone(tokens, 16)
        got, _ = await engines.both("stale", tokens, 16, first_block=2)
        assert got == expected

    engines.run(run())


def test_kv_that_never_arrived_is_computed(engines: Engines) -> None:
    async def run() -> None:
        tokens = prompt(300, 4)
        load = TransferParams(load=Load(request_id="never", attempt=0, num_tokens=299))
        assert await engines.d.generate("never", tokens, 8, load) == await engines.d.alone(tokens, 8)

    engines.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06])
def test_aborts_while_the_prompt_is_computed(engines: Engines, delay_s: float) -> None:
    async def run() -> None:
        name, tokens = f"ap{delay_s}", prompt(1500, int(delay_s * 100))
        named: dict[str, Any] = {"request_id": name, "attempt": 0}
        engines.d.link.send(None, Expect(**named, num_tokens=len(tokens)))
        send = TransferParams(send=Send(**named, target=engines.target))
        task = asyncio.create_task(engines.p.generate(name, tokens, 1, send))
        await asyncio.sleep(delay_s)
        await engines.p.llm.abort(name)
        engines.p.link.send(None, Cancel(**named, reason="the client left"))
        engines.d.link.send(None, Forget(**named, reason="the client left"))
        await asyncio.gather(task, return_exceptions=True)

    engines.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01])
def test_aborts_while_kv_is_loaded(engines: Engines, delay_s: float) -> None:
    async def run() -> None:
        name, tokens = f"ad{delay_s}", prompt(1500, int(delay_s * 1000))
        named: dict[str, Any] = {"request_id": name, "attempt": 0}
        engines.d.link.send(None, Expect(**named, num_tokens=len(tokens)))
        first = await engines.prefill(name, tokens)
        await engines.d.wait_for(name, Arrived)
        load = TransferParams(load=Load(**named, num_tokens=len(tokens)))
        task = asyncio.create_task(engines.d.generate(name, [*tokens, first], 50, load))
        await asyncio.sleep(delay_s)
        await engines.d.llm.abort(name)
        engines.d.link.send(None, Forget(**named))
        await asyncio.gather(task, return_exceptions=True)
        tokens = prompt(1500, 99)  # staging has room for it only if all slots are free again
        assert (await engines.both(f"{name}-next", tokens, 4))[0] == await engines.d.alone(tokens, 4)

    engines.run(run())


def test_a_decode_worker_of_another_life_gets_nothing(engines: Engines) -> None:
    async def run() -> None:
        target = KVTarget("d", 1, engines.target.address)
        await engines.prefill("epoch", prompt(300, 5), target)
        assert "boot epoch" in (await engines.p.wait_for("epoch", Sent)).reason

    engines.run(run())
