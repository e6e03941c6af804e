"""Log-probabilities of prompts through real processes: those of `transformers`, whole even if workers die."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
import torch

from ..rig import IS_OWN_ENGINE, wait_until
from .test_failures import ALL_REMOTE, SLOW_PREFILL, is_busy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 300, 700, 1500)
ATOL = {"tiny-random": 1e-4, "smollm2-135m": 2e-3}


def body_of(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "temperature": 0, "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip


def asked(system: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The one choice of each answer; all are in flight at once."""
    with httpx.Client(base_url=system.stack.url, timeout=240, trust_env=False) as client:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            reply = client.post("/v1/completions", json={"model": system.stack.model, **body})
            assert reply.status_code == 200, reply.text
            choice: dict[str, Any] = reply.json()["choices"][0]
            return choice

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(ask, bodies))


def check(choice: dict[str, Any], oracle: Any, prompt: list[int], max_tokens: int, atol: float) -> None:
    """The prompt's tokens and the generated ones, each as likely as it is, and the answer is the greedy one."""
    found = choice["logprobs"]
    sequence = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
    assert sequence == prompt + (oracle.greedy(prompt, max_tokens) if max_tokens else [])
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    exact = oracle.logprobs(sequence) if len(sequence) > 1 else torch.empty(0, 1)
    own = [row[token].item() for row, token in zip(exact, sequence[1:], strict=True)]
    assert found["token_logprobs"][1:] == pytest.approx(own, abs=atol)
    for row, top in zip(exact, found["top_logprobs"][1:], strict=True):
        assert sorted(top.values())[-2:] == pytest.approx(sorted(torch.topk(row, 2).values.tolist()), abs=atol)


@pytest.mark.parametrize("shape", [(1, 1), (0, 1), (2, 2)], ids=["1P1D", "0P1D", "2P2D"])
def test_they_are_those_of_transformers(
    system_of: Any, tiny_oracle: Any, random_prompts: Any, shape: tuple[int, int]
) -> None:
    system = system_of(*shape, router_flags=ALL_REMOTE if shape[0] else ())
    cases = [(p, n) for p in random_prompts(LENGTHS, vocab_size=256, seed=31) for n in (0, 1, 5)]
    plain = [{"prompt": prompt, "max_tokens": 9, "temperature": 0} for prompt, _ in cases[::4]]
    choices = asked(system, [*(body_of(*case) for case in cases), *plain])
    for choice, case in zip(choices, cases, strict=False):
        check(choice, tiny_oracle, *case, ATOL["tiny-random"])
    again = asked(system, [body_of(*case) for case in cases])
    for choice, case in zip(again, cases, strict=True):
        check(choice, tiny_oracle, *case, ATOL["tiny-random"])
    if IS_OWN_ENGINE:  # alone or in a batch, cached or not: to the last bit
        assert [choice["logprobs"] for choice in again] == [choice["logprobs"] for choice in choices[: len(cases)]]
    if shape[0]:
        assert system.metric("vllm:request_success", "prefill") > 0


@pytest.mark.own_engine  # its weights are a GGUF file
def test_those_of_a_real_model(system_of: Any, real_oracle: Any) -> None:
    system = system_of(model="smollm2-135m", router_flags=ALL_REMOTE)
    text = "The capital of France is Paris, and the capital of Italy is Rome. " * 9
    prompt = _tokens(system, text)
    cases = [(prompt, 0), (prompt[:40], 6), (random.Random(5).sample(range(49_000), 200), 1)]
    for choice, case in zip(asked(system, [body_of(*case) for case in cases]), cases, strict=True):
        check(choice, real_oracle("smollm2-135m"), *case, ATOL["smollm2-135m"])


def _tokens(system: Any, text: str) -> list[int]:
    reply = httpx.post(f"{system.stack.url}/tokenize", json={"prompt": text}, timeout=60, trust_env=False)
    tokens: list[int] = reply.json()["tokens"]
    return tokens


@pytest.mark.parametrize(("role", "max_tokens"), [("prefill", 1), ("decode", 40)])
def test_a_worker_that_dies_amid_them(
    system_of: Any, tiny_oracle: Any, random_prompts: Any, role: str, max_tokens: int
) -> None:
    system = system_of(2, 2, router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    prompts = random_prompts((900, 1100, 1300, 1500) * 3, vocab_size=256, seed=7)
    victim = system.stack.workers(role)[0]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asked, system, [body_of(prompt, max_tokens) for prompt in prompts])
        wait_until(lambda: is_busy(system, victim), "the victim has work")
        victim.kill()
        choices = asking.result()
    system.stack.restart(victim)
    for choice, prompt in zip(choices, prompts, strict=True):
        check(choice, tiny_oracle, prompt, max_tokens, ATOL["tiny-random"])


def test_the_official_client_gets_them_streamed(
    system_of: Any, closing: ExitStack, tiny_oracle: Any, random_prompts: Any
) -> None:
    system = system_of()
    (prompt,) = random_prompts((90,), vocab_size=256, seed=3)
    client = closing.enter_context(openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key="none", max_retries=0))
    body = body_of(prompt, 64)  # tokens that arrive together share a chunk: few of them may make but one
    extra = {name: body.pop(name) for name in ("ignore_eos", "return_tokens_as_token_ids")}
    chunks = list(client.completions.create(model=system.stack.model, stream=True, extra_body=extra, **body))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert len(parts) > 1 and len(parts[0].tokens) > len(prompt)
    names = ("tokens", "token_logprobs", "top_logprobs")
    whole = {name: [value for part in parts for value in getattr(part, name)] for name in names}
    check({"logprobs": whole}, tiny_oracle, prompt, 64, ATOL["tiny-random"])
