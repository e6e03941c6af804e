"""Calls that are demanded, in every form in which models write them: valid and the same wherever they are generated."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..rig import IS_OWN_ENGINE, MODEL
from .test_token_rules import ALL_REMOTE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FORMS = ("hermes", "pythonic", "harmony", "qwen3-coder", "kimi")
"""JSON, Python, special tokens, XML, and ids of calls; tests/router/text/calls/test_schemas.py has every format."""
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "place": {"type": "string", "minLength": 1, "maxLength": 12},
        "spots": {
            "type": "array",
            "items": {"type": "number", "minimum": -1, "maximum": 1},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["unit", "days", "place", "spots"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "climate")]
SEEDS = range(6)
NAMED = {"type": "function", "function": {"name": "climate"}}


def calls(system: Any, times: int = 1) -> list[list[tuple[str, dict[str, Any]]]]:
    """The calls of each answer: any call is demanded of even seeds, one of a function of odd ones."""

    def ask(seed: int) -> list[tuple[str, dict[str, Any]]]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "how warm? " * 20}], "max_tokens": 400}
        body |= {"tools": TOOLS, "tool_choice": NAMED if seed % 2 else "required", "temperature": 1.0, "seed": seed}
        body |= {"parallel_tool_calls": False}
        reply = httpx.post(f"{system.stack.url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, [*SEEDS] * times))


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_valid_and_the_same_wherever_they_are_generated(system_of: Any, form: str) -> None:
    from jsonschema import validate  # seconds to import

    parser = ("--tool-parser", form)
    alone = calls(system_of(0, 1, router_flags=parser))
    remote = calls(system_of(router_flags=(*parser, *ALL_REMOTE)))
    for seed, answer in zip((*SEEDS, *SEEDS), (*alone, *remote), strict=True):
        ((name, arguments),) = answer
        validate(arguments, SCHEMA)
        assert name == "climate" if seed % 2 else name in ("weather", "climate")
    if IS_OWN_ENGINE:
        assert remote == alone
