"""Thoughts of bounded length, and answers in the middle of a text, wherever they are made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_files.tiny import make_tiny_model

from ..rig import IS_OWN_ENGINE, wait_until
from .test_token_rules import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BUDGETS, END = (0, 1, 12, 40), list(b"</think>")
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 4, "n": 2, "logprobs": True, "top_logprobs": 2},
    "forbidden": {"temperature": 0, "bad_words": ["a", "e"], "repetition_penalty": 1.2},
}


def changed(folder: Path, names: dict[str, str]) -> Path:
    """The tiny model with other texts in its tokenizer's files."""
    make_tiny_model(folder)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens a thought. Its marks are tokens of single bytes."""
    opened = "assistant\\n<think>\\n' }}{# </think> #}"
    return changed(tmp_path_factory.mktemp("thinks") / "thinks", {"assistant\\n' }}": opened})


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokens around a middle, as StarCoder has them."""
    marks = {"<|im_start|>": "<fim_prefix>", "<|im_end|>": "<fim_suffix>", "<|pad|>": "<fim_middle>"}
    return changed(tmp_path_factory.mktemp("fills") / "fills", marks)


def thoughts(system: Any, num_tokens: int, form: str, times: int = 1) -> list[list[tuple[str, str, list[int]]]]:
    """Of each budget the choices, as thought, answer and tokens."""

    def ask(budget: int) -> list[tuple[str, str, list[int]]]:
        body = {"messages": [{"role": "user", "content": "why? " * 36}], "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"thinking_token_budget": budget, "return_token_ids": True, **FORMS[form]}
        reply = httpx.post(f"{system.stack.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        choices = [(choice["message"], choice["token_ids"]) for choice in reply.json()["choices"]]
        return [(told.get("reasoning_content") or "", told["content"] or "", tokens) for told, tokens in choices]

    with ThreadPoolExecutor(len(BUDGETS) * times) as pool:
        return list(pool.map(ask, BUDGETS * times))


@pytest.mark.parametrize("form", FORMS)
def test_a_thought_has_its_budget_wherever_it_is_made(system_of: Any, thinking: Path, form: str) -> None:
    alone = thoughts(system_of(0, 1, model=str(thinking)), 60, form)
    remote = thoughts(system_of(model=str(thinking), router_flags=ALL_REMOTE), 60, form)
    if IS_OWN_ENGINE or form != "sampled":
        assert remote == alone
    for budget, choices in zip(BUDGETS * 2, (*alone, *remote), strict=True):
        for thought, answer, tokens in choices:
            assert tokens[budget : budget + len(END)] == END and len(tokens) == 60
            assert thought == bytes(token for token in tokens[:budget] if token < 256).decode(errors="replace")
            assert answer and "</think>" not in thought + answer
    tight = ("--num-blocks", "40", "--watermark", "0")
    system = system_of(model=str(thinking), router_flags=ALL_REMOTE, decode_flags=tight)
    assert thoughts(system, 60, form, 4) == remote * 4
    assert system.metric("vllm:num_preemptions", "decode") > 0


@pytest.mark.parametrize("form", ["greedy", pytest.param("sampled", marks=pytest.mark.own_engine)])
def test_a_takeover_keeps_the_budget_of_a_thought(system_of: Any, thinking: Path, form: str) -> None:
    alone = thoughts(system_of(0, 1, model=str(thinking)), 400, form)
    system = system_of(1, 2, model=str(thinking), router_flags=ALL_REMOTE)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(thoughts, system, 400, form, 3)
        wait_until(lambda: system.metric("vllm:generation_tokens", "decode") >= 200, "answers are being decoded")
        victim = system.stack.workers("decode")[0]
        victim.kill()
        assert asking.result() == alone * 3
    system.stack.restart(victim)


@pytest.mark.parametrize("shape", [(0, 1), (1, 1)], ids=["alone", "transferred"])
def test_an_answer_stands_between_prompt_and_suffix(system_of: Any, filling: Path, shape: tuple[int, int]) -> None:
    system = system_of(*shape, model=str(filling), router_flags=ALL_REMOTE)
    before, after = "def sum(a, b):\n    " * 4, "\n    return total\n"
    fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}

    def ask(**body: Any) -> Any:
        reply = httpx.post(f"{system.stack.url}/v1/completions", json=fields | body, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    tokenizer_ids = httpx.post(
        f"{system.stack.url}/tokenize",
        json={"prompt": f"<fim_prefix>{before}<fim_suffix>{after}<fim_middle>", "add_special_tokens": False},
        timeout=60,
        trust_env=False,
    ).json()["tokens"]
    filled = ask(prompt=before, suffix=after)
    assert filled["prompt_token_ids"] == tokenizer_ids
    assert ask(prompt=tokenizer_ids) == filled
    assert len(filled["token_ids"]) == 20 and ask(prompt=before)["token_ids"] != filled["token_ids"]
