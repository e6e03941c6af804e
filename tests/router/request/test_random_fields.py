"""Random valid and invalid fields: no server error, errors in the API's own shape that name the field."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest

from ...examples import examples
from .test_known_fields import APIS, Api, known, named

NUM_EXAMPLES = examples(150)
"""For each API."""
JSON = {"content-type": "application/json"}
LEAVES = (
    *(None, True, False, 0, 1, -1, 2, 1.5, 1e308, 2**31, 2**63, -(2**63) - 1, 10**30),
    *(
        "",
        "a",
        "text",
        "function",
        "auto",
        "\u0000",
        "😀" * 9,
        "x" * 2000,
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"type": 5},
    ),
)


def mutated(value: Any, rng: random.Random) -> Any:
    """`value` with one of its parts left out, doubled or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice([*value])
        if rng.random() < 0.2:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng), *value[i + 1 :], *(value[i:] if rng.random() < 0.2 else ())]
    return copy.deepcopy(rng.choice(LEAVES))


def body_of(api: Api, rng: random.Random) -> dict[str, Any]:
    """A valid request with up to four outcomes' fields, some of them damaged."""
    outcomes = [outcome for _, outcome in known(api, "served", "no effect", "refused")]
    body: dict[str, Any] = dict(api.base)
    for _ in range(rng.randrange(5)):
        body |= rng.choice(outcomes).fields
    for _ in range(rng.randrange(3)):
        body = mutated(body, rng) if body else body
        if not isinstance(body, dict):
            return dict(api.base)
    return body


def is_error(api: Api, body: Any) -> bool:
    if "messages" in api.path:
        return body.keys() == {"type", "error"} and {"type", "message"} <= body["error"].keys()
    return body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}


def names_a_field(api: Api, error: Any) -> bool:
    """Anthropic's errors name the field in their text, except those in Anthropic's own words."""
    overflow = error["message"].startswith(
        ("prompt is too long: ", "input length and `max_tokens` exceed", "there is no")
    )
    field = re.split(r"[.\[]", named(error))[0]
    return field in api.table or field in api.extensions or ("param" not in error and overflow)


@pytest.mark.parametrize("response_store", ["memory"])
@pytest.mark.parametrize("name", APIS)
async def test_random_fields(start: Any, tools: Any, name: str) -> None:
    api, running = APIS[name], await start(tools.Engine(max_model_len=1024, eos_after=3, per_event=64))
    for seed in range(NUM_EXAMPLES):
        body = body_of(api, random.Random(seed))
        reply = await running.http.post(api.path, content=json.dumps(body), headers=JSON)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        assert "failed to handle" not in reply.text, body  # in a stream
        if reply.status_code != 200:
            assert is_error(api, reply.json()), (body, reply.text)
            assert names_a_field(api, reply.json()["error"]), (body, reply.text)
