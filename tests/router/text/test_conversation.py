from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from common.errors import InvalidRequest
from router.text.conversation import template_messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        (["a", "b"], "a\nb"),
    ],
)
def test_content_becomes_one_string(content: Any, text: str) -> None:
    assert template_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url': this model supports only text"),
        ([{"type": "text"}], "'text'"),
        ([3], "a part of type int"),
        ([{"type": ["list"], "text": "a"}], "list"),
        (7, "is of type int"),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        template_messages([{"role": "user", "content": "x"}, {"role": "user", "content": content}])
    assert raised.value.param == "messages[1].content"


def test_null_fields_are_left_out() -> None:
    assert template_messages([{"role": "user", "content": "x", "name": None, "tool_calls": None}]) == [
        {"role": "user", "content": "x"}
    ]


def test_developer_is_system_unless_the_template_has_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert template_messages([message])[0]["role"] == "system"
    assert template_messages([message], has_developer=True)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"x": 1}', {"x": 1}),
        ("", {}),
        ("[1]", "[1]"),
        ("{broken", "{broken"),
        ({"x": 1}, {"x": 1}),
        ("[" * 9**5, None),
    ],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, parsed: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments if parsed is None else parsed}
    assert call["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize("calls", ["text", 3, [3], [{}], [{"function": "f"}]])
def test_tool_calls_of_another_shape_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of function calls"):
        template_messages([{"role": "assistant", "content": None, "tool_calls": calls}])


@pytest.mark.parametrize("num_calls", [1, 100])
def test_arguments_are_counted_before_they_are_parsed(num_calls: int) -> None:
    """Their JSON is a text within the body's JSON, in which nothing else counts it."""
    arguments = '{"a":[' + "{}," * (2_500_000 // num_calls) + "1]}"
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls} for _ in range(num_calls)]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="the arguments of tool calls have more than 200,000 JSON values"):
            template_messages(messages)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
