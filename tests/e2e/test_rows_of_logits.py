"""Logits of more, fewer and as many rows as the tokenizer has tokens: they differ by words of a grammar's mask."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.model_files.tiny import VOCAB_SIZE

from .test_failures import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MORE = 3 * 32
NUM_TOKENS = 300
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bb"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
SIDE = {"type": "object", "properties": {"side": {"type": "boolean"}}, "required": ["side"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SIDE}}


def with_more_rows(folder: Path) -> None:
    """As Qwen's: the likeliest tokens are rows that no token has."""
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = weights[name][torch.arange(MORE) % VOCAB_SIZE]
        weights[name] = torch.cat((weights[name], 2 * more if name == "lm_head.weight" else more)).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE + MORE}))


def with_more_tokens(folder: Path) -> None:
    """Added without rows. Some spell what the grammar forces."""
    document = json.loads((folder / "tokenizer.json").read_text())
    one = document["added_tokens"][0] | {"special": False, "normalized": False}
    texts = ['{"kind":', '"kind"', '"sure":', "true", "bb", *(f"added {i}" for i in range(MORE))]
    document["added_tokens"] += [{**one, "id": VOCAB_SIZE + i, "content": text} for i, text in enumerate(texts)]
    (folder / "tokenizer.json").write_text(json.dumps(document))


def as_it_is(folder: Path) -> None:
    """As many rows as tokens."""


@pytest.mark.parametrize("change", [with_more_rows, with_more_tokens, as_it_is])
def test_grammars_fit_the_logits_and_harm_no_stream(
    system_of: Any, tiny_folder: Path, tmp_path: Path, random_prompts: Any, change: Any
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / change.__name__))
    change(folder)
    system = system_of(model=str(folder), router_flags=ALL_REMOTE)
    prompts = random_prompts((40, 60, 80), vocab_size=256, seed=5)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    with (
        httpx.Client(base_url=system.stack.url, timeout=120, trust_env=False) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        others = pool.submit(system.generate, prompts, max_tokens=NUM_TOKENS, cache_salt="others")
        for number in range(8):
            sampling = {"temperature": 0} if number % 2 else {"temperature": 1.5, "seed": number}
            body = {"model": system.stack.model, "max_tokens": 200, **sampling}
            reply = client.post("/v1/completions", json={**body, "prompt": "thing", "response_format": wanted})
            assert reply.status_code == 200, reply.text
            assert set(json.loads(reply.json()["choices"][0]["text"])) == {"kind", "sure"}
            message = {"role": "user", "content": "look"}
            chat = {**body, "messages": [message], "tools": [TOOL], "tool_choice": "required"}
            reply = client.post("/v1/chat/completions", json=chat)
            assert reply.status_code == 200, reply.text
            (call, *_) = reply.json()["choices"][0]["message"]["tool_calls"]
            assert "side" in json.loads(call["function"]["arguments"])
        assert others.result() == expected
    assert all(worker.alive for worker in system.stack.workers())
