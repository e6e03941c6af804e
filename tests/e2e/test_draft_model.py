"""A draft model on the decode workers of a whole system: the tokens are those without it, whatever happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.model_files.tiny import make_tiny_model

from .test_failures import ALL_REMOTE, run_with
from .test_handover import leave, under_load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]

NUM_LAYERS, TIMES = 4, 6
LENGTHS = (1, 15, 16, 17, 40, 130, 300)
NUM_TOKENS = 48
KINDS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.3, "n": 2},
    {"temperature": 1.0, "seed": 5, "min_tokens": 20, "logit_bias": {"65": 2.0}, "stop": ["zz"]},
)


@pytest.fixture(scope="session")
def slow_model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with layers behind its own that add nothing: it says the same, and takes six times as long."""
    folder = tmp_path_factory.mktemp("slow") / "slow"
    shutil.copytree(tiny_folder, folder)
    (found,) = folder.glob("*.safetensors")
    weights = load_file(found)
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        adds = "o_proj" in name or "down_proj" in name
        for layer in range(NUM_LAYERS, TIMES * NUM_LAYERS):
            copied = weights[name]
            weights[name.replace(".0.", f".{layer}.")] = np.zeros_like(copied) if adds else copied.copy()
    save_file(weights, found, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": TIMES * NUM_LAYERS}))
    return str(folder)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same vocabulary, and never of the same opinion."""
    return str(make_tiny_model(tmp_path_factory.mktemp("other") / "other", seed=1))


def drafting(draft: str, *flags: str) -> tuple[str, ...]:
    return ("--draft-model", draft, "--draft-quantization", "none", *flags)


def counted(system: Any, kind: str, worker: Any = None) -> dict[str, float]:
    """Draft tokens, and those accepted, of one kind, over the decode workers."""
    found = {"draft_tokens": 0.0, "accepted_tokens": 0.0}
    for one in system.stack.workers("decode"):
        page = httpx.get(f"{one.http_url}/metrics", timeout=30.0, trust_env=False).text
        for name in found:
            start = f"vllm:spec_decode_num_{name}_total{{"
            lines = [line for line in page.splitlines() if line.startswith(start) and f'kind="{kind}"' in line]
            found[name] += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return found


def answers(system: Any, prompts: list[list[int]], params: Mapping[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of every choice."""
    found = []
    with httpx.Client(base_url=system.stack.url, timeout=120.0, trust_env=False) as client:
        for prompt in prompts:
            body = {"model": system.stack.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
            reply = client.post("/v1/completions", json=body | {"temperature": 0, "ignore_eos": True, **params})
            assert reply.status_code == 200, reply.text
            for choice in reply.json()["choices"]:
                logprobs = (choice["logprobs"] or {}).get("token_logprobs")
                found.append((choice["token_ids"], choice["text"], choice["finish_reason"], logprobs))
    return found


@pytest.mark.parametrize(
    ("is_right", "flags"),
    [(True, ()), (False, ()), (True, ("--tensor-parallel-size", "2"))],
    ids=["always right", "never right", "two ranks"],
)
def test_tokens_are_those_without_a_draft_model(
    *,
    system_of: Any,
    random_prompts: Any,
    tiny_oracle: Any,
    slow_model: str,
    other_model: str,
    is_right: bool,
    flags: tuple[str, ...],
) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=5)  # no two tokens of one place are nearly equally likely
    plain = system_of(router_flags=ALL_REMOTE, decode_flags=("--max-draft-tokens", "0"))
    expected = [answers(plain, prompts[3:6], params) for params in KINDS]
    draft = "tiny-random" if is_right else other_model
    system = system_of(model=slow_model, router_flags=ALL_REMOTE, decode_flags=drafting(draft, *flags))
    greedy = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    for at_once in (1, 8, 2):  # the second and third time prompts are cached
        assert system.generate(prompts, max_tokens=NUM_TOKENS, at_once=at_once) == greedy
    found = [answers(system, prompts[3:6], params) for params in KINDS]
    for ours, theirs in zip(found, expected, strict=True):
        assert [answer[:3] for answer in ours] == [answer[:3] for answer in theirs]
        for (*_, some), (*_, others) in zip(ours, theirs, strict=True):
            assert (some or []) == pytest.approx(others or [], abs=1e-4)
    counts = counted(system, "model")
    assert counts["draft_tokens"] > 0
    if is_right:
        assert counts["accepted_tokens"] > 0.9 * counts["draft_tokens"] > 300
        assert "accepted=" in system.stack.router.log.read_text()
        assert system.metric("diptych_draft_kv_blocks", "decode") > 0
        page = httpx.get(f"{system.stack.url}/metrics", timeout=30.0, trust_env=False).text
        assert "vllm:spec_decode_num_accepted_tokens_per_pos_total{" in page


def test_preempted_answers_are_the_same(system_of: Any, random_prompts: Any, tiny_oracle: Any, slow_model: str) -> None:
    flags = drafting("tiny-random", "--num-blocks", "24", "--watermark", "0")
    system = system_of(model=slow_model, router_flags=ALL_REMOTE, decode_flags=flags)
    prompts = random_prompts((30, 40, 50, 60, 70, 80), vocab_size=256, seed=2)
    expected = [tiny_oracle.greedy(prompt, 100) for prompt in prompts]
    assert system.generate(prompts, max_tokens=100, at_once=6) == expected
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert counted(system, "model")["accepted_tokens"] > 0


def test_a_killed_decode_worker_and_one_that_drains(system_of: Any, random_prompts: Any, slow_model: str) -> None:
    system = system_of(
        1, 2, model=slow_model, decode_flags=drafting("tiny-random"),
        router_flags=(*ALL_REMOTE, "--drain-timeout-s", "60"), worker_flags=("--drain-timeout-s", "60"),
    )  # fmt: skip
    prompts = random_prompts((30, 200, 350), vocab_size=256, seed=3)
    answers_survive_a_kill_and_a_drain(system, prompts)


def answers_survive_a_kill_and_a_drain(system: Any, prompts: Any) -> None:
    """A decode worker is killed amid sampled answers, then one drains under load; draft tokens were accepted."""
    params = {"temperature": 1.0, "seed": 5}
    expected = system.generate(prompts, max_tokens=400, **params)
    victim = system.stack.workers("decode")[0]
    got = run_with(system, prompts, victim, victim.kill, cache_salt="killed", **params)
    system.stack.restart(victim)
    system.wait_for_workers()
    assert got == expected
    with under_load(system, prompts) as load:
        load.wait_for_streams(4)
        leave(victim)
    system.stack.restart(victim)
    system.wait_for_workers()
    assert counted(system, "model")["accepted_tokens"] > 0
