"""Ollama's Python client: chats whole and streamed, a tool and its result, a schema, a prompt, and the models."""

from __future__ import annotations

from typing import Any

import ollama
from weather import PARAMETERS, QUESTION, get_weather, place, tell

url, name = place()
TURNS: list[Any] = [{"role": "user", "content": QUESTION}]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def parts(*messages: Any) -> list[Any]:
    """The thought, the text and the calls of an answer or of its pieces."""
    calls = [[call.function.name, call.function.arguments] for one in messages for call in one.tool_calls or ()]
    return ["".join(one.thinking or "" for one in messages), "".join(one.content or "" for one in messages), calls]


client = ollama.Client(host=url)
asked: dict[str, Any] = {"model": name, "tools": [get_weather], "keep_alive": "5m"}
whole = client.chat(messages=TURNS, think=True, **asked)
pieces = list(client.chat(messages=TURNS, think=True, stream=True, **asked))
plain = client.chat(messages=TURNS, think=False, **asked)
assert whole.message.tool_calls is not None
turns = [*TURNS, whole.message]
for call in whole.message.tool_calls:
    turns.append({"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)})
after = client.chat(messages=turns, think=True, **asked)
schema = client.chat(name, HI, format=PARAMETERS, think=False, options={"num_predict": 200, "temperature": 0})
said = client.generate(name, "Hi", think=False, options=ollama.Options(num_predict=50, seed=1, stop=["zzz"]))
streamed = list(client.generate(name, "Hi", stream=True, think=False))
shown = client.show(name)
try:
    client.chat("absent", HI)
    missing: Any = None
except ollama.ResponseError as error:
    missing = [error.status_code, error.error]
tell(
    whole=parts(whole.message),
    streamed=parts(*(piece.message for piece in pieces)),
    plain=parts(plain.message),
    after=parts(after.message),
    reasons=[whole.done_reason, pieces[-1].done_reason],
    tokens=[said.eval_count, said.prompt_eval_count, streamed[-1].eval_count],
    took=min(said.total_duration or 0, said.prompt_eval_duration or 0),
    schema=schema.message.content,
    said=said.response,
    generated="".join(piece.response for piece in streamed),
    models=[model.model for model in client.list().models],
    running=[model.model for model in client.ps().models],
    family=shown.details.family if shown.details is not None else None,
    capabilities=shown.capabilities,
    missing=missing,
)
