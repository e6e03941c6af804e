"""Two models with weights of their own behind one router: real workers, which say what they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ..rig import READY_S, TwoModels, make_stack_of_two

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (1, 17, 64, 200, 700)
KEYS = """
[[key]]
name = "first-only"
key = "a-key-for-the-first-model"
models = ["first"]

[[key]]
name = "all"
key = "a-key-for-both-of-them"
admin = true
"""
BOTH = {"authorization": "Bearer a-key-for-both-of-them"}
FIRST = {"authorization": "Bearer a-key-for-the-first-model"}


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[TwoModels]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    models = keys.with_name("models.toml")
    models.write_text("".join(f'[[model]]\nmodel = "{folder}"\n' for folder in folders.values()))
    flags = ("--models-file", str(models), "--api-key-file", str(keys))
    stack = make_stack_of_two(folders, flags, tmp_path_factory.mktemp("logs"))
    with stack:
        found = TwoModels(stack, folders, BOTH)
        found.wait_for_workers()
        yield found
        found.http.close()


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, Callable[[list[int]], list[int]]]:
    """What `transformers` generates with each model."""
    from transformers import AutoModelForCausalLM

    def oracle(folder: Path) -> Callable[[list[int]], list[int]]:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        def greedy(prompt: list[int]) -> list[int]:
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    max_new_tokens=TwoModels.NUM_TOKENS,
                    min_new_tokens=TwoModels.NUM_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            return [int(token) for token in output[0, len(prompt) :]]

        return greedy

    return {name: oracle(folder) for name, folder in folders.items()}


def test_each_model_answers_as_itself(two: TwoModels, oracles: Any, random_prompts: Any) -> None:
    for prompt in random_prompts(LENGTHS, vocab_size=256, seed=3):
        wanted = {model: oracle(prompt) for model, oracle in oracles.items()}
        assert wanted["first"] != wanted["second"]
        assert {model: two.tokens(model, prompt) for model in wanted} == wanted
    served = {worker["worker_id"]: worker["model"] for worker in two.http.get("/load").json()["workers"]}
    assert served == {"prefill-0": "first", "decode-0": "first", "prefill-1": "second", "decode-1": "second"}


def test_unknown_models_and_keys(two: TwoModels) -> None:
    refused = two.ask("third", [1, 2, 3])
    assert refused.status_code == 404
    assert refused.json()["error"] == {
        "message": "The model 'third' does not exist. Available models: 'first', 'second'.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert two.ask("first", [1, 2, 3], **FIRST).status_code == 200
    assert two.ask("second", [1, 2, 3], **FIRST).status_code == 403
    listed = two.http.get("/v1/models", headers=FIRST).json()["data"]
    assert [one["id"] for one in listed] == ["first"]


def test_a_dead_pool_leaves_the_other_model_alone_and_its_requests_wait(
    two: TwoModels, oracles: Any, random_prompts: Any
) -> None:
    """A model that has scaled to zero holds its requests until a worker of it comes."""
    prompt, other = random_prompts((40, 90), vocab_size=256, seed=4)
    gone = two.workers("second")
    for worker in gone:
        worker.kill()
    two.wait_ready("second", 503)
    ready = {one["id"]: one["ready"] for one in two.http.get("/v1/models").json()["data"]}
    assert ready == {"first": True, "second": False}

    async def held() -> list[int]:
        waiting = asyncio.create_task(asyncio.to_thread(two.tokens, "second", prompt))
        assert await asyncio.to_thread(two.tokens, "first", other) == oracles["first"](other)
        assert not waiting.done()
        for worker in gone:
            await asyncio.to_thread(two.stack.restart, worker)
        return await waiting

    assert asyncio.run(held()) == oracles["second"](prompt)
    two.wait_for_workers()


def test_a_worker_that_comes_back_with_another_model_serves_that_one(
    two: TwoModels, oracles: Any, random_prompts: Any
) -> None:
    (prompt,) = random_prompts((50,), vocab_size=256, seed=5)
    first, second = (str(folder) for folder in two.folders.values())
    decode = next(worker for worker in two.workers("second") if worker.role == "decode")
    place = decode.command.index(second)
    try:
        decode.kill()
        decode.command[place] = first
        two.stack.restart(decode)
        two.wait_ready("second", 503)
        deadline = time.monotonic() + READY_S
        while sum(one["model"] == "first" for one in two.http.get("/load").json()["workers"]) < 3:
            assert time.monotonic() < deadline, two.stack.router.log_tail()
            time.sleep(0.05)
        assert two.tokens("first", prompt) == oracles["first"](prompt)
        detail = two.http.get("/ready").json()["detail"]
        assert detail.startswith("second: no decode worker serves this model")
    finally:
        decode.kill()
        decode.command[place] = second
        two.stack.restart(decode)
        two.wait_for_workers()
    assert two.tokens("second", prompt) == oracles["second"](prompt)
