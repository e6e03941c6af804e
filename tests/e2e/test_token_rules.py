"""Rules on tokens hold wherever an answer is made: by prefill, after a transfer, a preemption and a takeover."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..rig import IS_OWN_ENGINE, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALL_REMOTE = ("--local-prefill-threshold", "0")
ALLOWED = [*b"abcdefgh ,."]
BAD = ["ab", "c", "d e", ",,"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"allowed_token_ids": ALLOWED, "bad_words": BAD},
    "sampled": {"allowed_token_ids": ALLOWED, "bad_words": BAD, "temperature": 1.0, "seed": 5, "logprobs": 3},
    "penalised": {"bad_words": BAD, "repetition_penalty": 1.2, "logit_bias": {str(i): 20 for i in ALLOWED}},
    "in a form": {
        "allowed_token_ids": [*ALLOWED, *b'"{}:'],
        "bad_words": ["f"],
        "structured_outputs": {"regex": "[a-h]+"},
        "ignore_eos": False,
        "temperature": 1.0,
        "seed": 3,
    },
}
PROMPTS, NUM_TOKENS = (5, 40, 100, 130), 60
PATIENCE = 5
"""Times that workers with few blocks are asked all again until they have had to preempt."""


@pytest.fixture(scope="module")
def prompts(random_prompts: Any) -> list[list[int]]:
    found: list[list[int]] = random_prompts(PROMPTS, vocab_size=256, seed=12)
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_place_keeps_the_rules(system_of: Any, prompts: list[list[int]], name: str) -> None:
    fields = {"max_tokens": NUM_TOKENS, **RULES[name]}
    alone = system_of(0, 1).generate(prompts, at_once=1, **fields)
    remote = system_of(router_flags=ALL_REMOTE).generate(prompts, **fields)
    for tokens in (*alone, *remote):
        text = bytes(token for token in tokens if token < 256)
        assert not any(word.encode() in text for word in (RULES[name]["bad_words"]))
        assert set(text) <= set(RULES[name].get("allowed_token_ids", range(256)))
    if IS_OWN_ENGINE or "seed" not in fields:
        assert remote == alone
    tight = system_of(router_flags=ALL_REMOTE, decode_flags=("--num-blocks", "24", "--watermark", "0"))
    preempted = 0.0
    for _ in range(PATIENCE):  # how many requests meet depends on the load if blocks are long
        assert tight.generate(prompts * 3, **fields) == remote * 3
        if name == "in a form" or (preempted := tight.metric("vllm:num_preemptions", "decode")):
            break
    assert name == "in a form" or preempted > 0


@pytest.mark.parametrize("name", ["greedy", pytest.param("sampled", marks=pytest.mark.own_engine)])
def test_a_takeover_keeps_the_rules(system_of: Any, prompts: list[list[int]], name: str) -> None:
    fields = {"max_tokens": 400, **RULES[name]}
    alone = system_of(0, 1).generate(prompts, at_once=1, **fields)
    system = system_of(1, 2, router_flags=ALL_REMOTE)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(system.generate, prompts * 4, **fields)
        wait_until(lambda: system.metric("vllm:generation_tokens", "decode") >= 200, "answers are being decoded")
        victim = system.stack.workers("decode")[0]
        victim.kill()
        assert asking.result() == alone * 4
    system.stack.restart(victim)


def test_log_probabilities_of_the_whole_vocabulary(system_of: Any, prompts: list[list[int]]) -> None:
    system = system_of(router_flags=(*ALL_REMOTE, "--max-logprobs", "-1"))
    fields = {"prompt": prompts[1], "max_tokens": 4, "temperature": 0, "logprobs": -1, "prompt_logprobs": -1}
    fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    reply = httpx.post(f"{system.stack.url}/v1/completions", json=fields, timeout=60, trust_env=False)
    (choice,) = reply.json()["choices"]
    generated = choice["logprobs"]["top_logprobs"]
    of_prompt = [{i: token["logprob"] for i, token in row.items()} for row in choice["prompt_logprobs"][1:]]
    assert (len(generated), len(of_prompt)) == (4, len(prompts[1]) - 1)
    for row in (*generated, *of_prompt):
        assert len(row) > 256 and math.isclose(sum(map(math.exp, row.values())), 1.0, rel_tol=1e-4)
    for row, token_id in zip(choice["prompt_logprobs"][1:], prompts[1][1:], strict=True):
        better = sum(token["logprob"] > row[str(token_id)]["logprob"] for token in row.values())
        assert row[str(token_id)]["rank"] == better + 1  # random weights: no two are equal
    assert [max(row, key=row.get) for row in generated] == [f"token_id:{i}" for i in choice["token_ids"]]


@pytest.mark.own_engine
def test_log_probabilities_of_chosen_tokens_and_ranks(system_of: Any, prompts: list[list[int]]) -> None:
    system = system_of(router_flags=ALL_REMOTE)
    fields = {"prompt": prompts[1], "max_tokens": 4, "temperature": 0, "return_tokens_as_token_ids": True}
    ask = {"logprobs": 1, "logprob_token_ids": [65, 66], "prompt_logprobs": 0, "return_token_ids": True}
    reply = httpx.post(f"{system.stack.url}/v1/completions", json=fields | ask, timeout=60, trust_env=False)
    (choice,) = reply.json()["choices"]
    for row, token_id in zip(choice["logprobs"]["top_logprobs"], choice["token_ids"], strict=True):
        assert row.keys() == {"token_id:65", "token_id:66", f"token_id:{token_id}"}
    assert all(token["rank"] >= 1 for row in choice["prompt_logprobs"][1:] for token in row.values())


@pytest.mark.parametrize("shape", [(1, 1), (0, 1)])
def test_rules_that_no_token_fits_are_the_clients_fault(system_of: Any, shape: tuple[int, int]) -> None:
    """The prefill worker tells both the router and the decode worker, whose report may come first."""
    system = system_of(*shape, router_flags=ALL_REMOTE)
    fields = {"prompt": "hello", "allowed_token_ids": [*b"abc"], "structured_outputs": {"regex": "x+"}}
    for _ in range(20):
        reply = httpx.post(f"{system.stack.url}/v1/completions", json=fields, timeout=60, trust_env=False)
        assert reply.status_code == 400 and "allowed_token_ids" in reply.json()["error"]["message"]


def test_beams_are_the_same_wherever_they_are_computed(system_of: Any, prompts: list[list[int]]) -> None:
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 12, "temperature": 0, "return_token_ids": True}

    def best(system: Any) -> list[list[list[int]]]:
        answers = []
        for prompt in prompts:
            body = {**fields, "prompt": prompt, "ignore_eos": True}
            reply = httpx.post(f"{system.stack.url}/v1/completions", json=body, timeout=60, trust_env=False)
            assert reply.status_code == 200, reply.text
            answers.append([choice["token_ids"] for choice in reply.json()["choices"]])
        return answers

    local = best(system_of(0, 1))
    assert all(len({tuple(tokens) for tokens in choices}) == 3 for choices in local)
    assert best(system_of(router_flags=ALL_REMOTE)) == local
