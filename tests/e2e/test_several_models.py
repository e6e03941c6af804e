"""Two models with weights of their own behind one router: real workers, which say what they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.stack import Stack, StackProcess
from common.model_files.tiny import make_tiny_model

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12
LENGTHS = (1, 17, 64, 200, 700)
DEADLINE_S = 120.0
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


class TwoModels:
    """A router with a prefill and a decode worker for each of the models `first` and `second`."""

    def __init__(self, stack: Stack, folders: dict[str, Path]) -> None:
        self.stack, self.folders = stack, folders
        self.http = httpx.Client(base_url=stack.url, timeout=DEADLINE_S, trust_env=False, headers=BOTH)

    def workers(self, model: str) -> list[StackProcess]:
        return [one for one in self.stack.workers() if str(self.folders[model]) in one.command]

    def ask(self, model: str, prompt: list[int], **headers: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)

    def tokens(self, model: str, prompt: list[int]) -> list[int]:
        reply = self.ask(model, prompt)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        return list(reply.json()["choices"][0]["token_ids"])

    def wait_ready(self, model: str, status: int = 200) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.http.get(f"/ready?model={model}").status_code != status:
            assert time.monotonic() < deadline, self.stack.router.log_tail()
            time.sleep(0.05)

    def wait_for_workers(self) -> None:
        """Until every worker serves: a router is ready with decode workers alone."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            states = [worker["state"] for worker in self.http.get("/load").json()["workers"]]
            if states == ["ready"] * len(self.stack.workers()):
                return
            assert time.monotonic() < deadline, (states, self.stack.router.log_tail())
            time.sleep(0.05)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(home / name, seed=seed) for seed, name in enumerate(("first", "second"), 11)}


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[TwoModels]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    first, second = (str(folder) for folder in folders.values())
    flags = (
        "--model",
        second,
        "--api-key-file",
        str(keys),
        "--local-prefill-threshold",
        "0",
        "--queue-timeout-s",
        "90",
    )
    stack = Stack(
        2,
        2,
        model=first,
        worker_flags=("--kv-memory-gib", "0.05", "--threads", "1"),
        router_flags=flags,
        log_dir=tmp_path_factory.mktemp("logs"),
        ready_timeout_s=DEADLINE_S,
    )
    for worker in stack.workers():
        if worker.name.endswith("-1"):
            worker.command[worker.command.index(first)] = second
    with stack:
        found = TwoModels(stack, folders)
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
                    max_new_tokens=NUM_TOKENS,
                    min_new_tokens=NUM_TOKENS,
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
        "message": "there is no model 'third' here, only 'first', 'second'",
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
        deadline = time.monotonic() + DEADLINE_S
        while sum(one["model"] == "first" for one in two.http.get("/load").json()["workers"]) < 3:
            assert time.monotonic() < deadline, two.stack.router.log_tail()
            time.sleep(0.05)
        assert two.tokens("first", prompt) == oracles["first"](prompt)
        detail = two.http.get("/ready").json()["detail"]
        assert detail.startswith("second: no decode worker says that it serves this model")
    finally:
        decode.kill()
        decode.command[place] = second
        two.stack.restart(decode)
        two.wait_for_workers()
    assert two.tokens("second", prompt) == oracles["second"](prompt)
