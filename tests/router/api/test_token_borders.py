"""Tokens that reach over the borders of stop strings, marks and parts: streamed answers equal whole ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from common.model_files.files import ModelFiles
from router.text.text_pipeline import TextPipeline

from .test_reasoning import TEMPLATE

TOKENS = ("a\n", "\n\n", "x#", "k>b", "</thin", "b<tool", "!ST")
"""Tokens of several characters, besides those of single bytes."""
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "now"}}]
TOOLS = [{"type": "function", "name": "now", "parameters": None, "strict": None}]


@pytest.fixture(scope="module")
def pipeline(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextPipeline]:
    inner = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    inner.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in TOKENS])
    path: Path = tmp_path_factory.mktemp("borders") / "tokenizer.json"
    inner.save(str(path))
    made = TextPipeline.from_files(
        replace(files, tokenizer=path, chat_template=TEMPLATE, vocab_size=inner.get_vocab_size()), threads=1
    )
    yield made
    made.close()


@pytest.fixture
async def running(start: Any, tools: Any, pipeline: TextPipeline) -> AsyncIterator[Any]:
    yield await start(tools.Engine(), pipeline=pipeline)


def say(running: Any, pipeline: TextPipeline, text: str, per_event: int) -> None:
    script = pipeline.tokenizer.encode(text, add_special_tokens=False)
    running.engine.script, running.engine.eos_after, running.engine.per_event = script, len(script), per_event


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("per_event", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "fields", "shown"),
    [
        ("<think>h</think>\n\naa\nb", {"stop": ["\n\n"]}, [["a", "a\n", "b"]]),
        ("hex#z", {"stop": ["#y"]}, [["h", "e", "x#", "z"]]),
        ("hex#yz", {"stop": ["#y"]}, [["h", "e", "x#"]]),
        ("hex#", {"stop": ["#y"]}, [["h", "e", "x#"]]),
        (f"hi b{CALL}", {"stop": ["#"], "tools": TOOLS}, [["h", "i", " ", "b<tool"]]),
        (f"x#{CALL}\nx#", {"stop": ["#y"], "tools": TOOLS}, [["x#"], ["x#"]]),
    ],
)
async def test_log_probabilities_of_a_response(
    running: Any, pipeline: TextPipeline, per_event: int, text: str, fields: dict[str, Any], shown: list[list[str]]
) -> None:
    """A token whose first characters were shown before the others belongs to the message too."""
    say(running, pipeline, text, per_event)
    asked = {"input": "hi", **LOGPROBS, **fields}
    whole = (await running.http.post("/v1/responses", json=asked)).json()
    lines = (await running.http.post("/v1/responses", json=asked | {"stream": True})).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for response in (whole, events[-1]["response"]):
        messages = [item["content"][0]["logprobs"] for item in response["output"] if item["type"] == "message"]
        assert [[token["token"] for token in logprobs] for logprobs in messages] == shown
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [token["token"] for event in deltas for token in event["logprobs"]]
    assert streamed == [token for tokens in shown for token in tokens]


@pytest.fixture(scope="module")
def marked(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextPipeline]:
    """A model whose marks of thoughts are special tokens."""
    inner = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in ("<think>", "</think>")])
    path: Path = tmp_path_factory.mktemp("special") / "tokenizer.json"
    inner.save(str(path))
    made = TextPipeline.from_files(
        replace(files, tokenizer=path, chat_template=TEMPLATE, vocab_size=inner.get_vocab_size()), threads=1
    )
    yield made
    made.close()


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"stop": ["h"]}, {"tools": [{"type": "function", "function": {"name": "now"}}]}]
)
@pytest.mark.parametrize("opened", [False, True])
async def test_marks_of_thoughts_may_be_special_tokens(
    start: Any, tools: Any, marked: TextPipeline, opened: bool, fields: dict[str, Any], stream: bool
) -> None:
    running = await start(tools.Engine(), pipeline=marked)
    say(running, marked, "hm</think>\nYes." if opened else "<think>hm</think>\nYes.", 1)
    fields = {**fields, "chat_template_kwargs": {"opened": opened}, "max_tokens": 99}
    if stream:
        deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", **fields))[:-1]]
    else:
        deltas = [(await running.chat(**fields)).json()["choices"][0]["message"]]
    shown = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")]
    assert shown == ["hm", "Yes."]
    if "tools" in fields:  # text of a grammar has no special tokens
        grammar, marks = running.engine.requests[0].params.grammar, ["</think>"] if opened else ["<think>", "</think>"]
        assert all(f"<[{marked.tokenizer.token_to_id(mark)}]>" in grammar for mark in marks)
