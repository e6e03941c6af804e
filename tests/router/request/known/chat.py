"""Every field of OpenAI's `POST /v1/chat/completions` and of its older `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from .outcome import Table, each, no_effect, refused, served

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FUNCTION = {"name": "now", "description": "the time", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CACHED = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def assistant(**members: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", **members}, HI]}


def json_schema(**members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **members}}}


def tool(**members: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": FUNCTION | members}]}


BOTH: Table = {
    "model": served(model="tiny-random"),
    "frequency_penalty": served(frequency_penalty=0.5),
    "presence_penalty": served(presence_penalty=-0.5),
    "logit_bias": served(logit_bias={"65": 5}),
    "max_tokens": served(max_tokens=3),
    "n": served(n=2),
    "seed": served(seed=7),
    "stop": served(stop=["x"]),
    "stream": served(stream=True),
    "stream=true": served(stream=True),
    "stream_options": served(stream=True, stream_options={"include_usage": True}),
    "stream_options.include_usage": served(stream=True, stream_options={"include_usage": True}),
    "stream_options.include_obfuscation": no_effect(stream=True, stream_options={"include_obfuscation": True}),
    "temperature": served(temperature=0.5),
    "top_p": served(top_p=0.5),
    "user": no_effect(user="me"),
}

COMPLETIONS: Table = BOTH | {
    "prompt": served(prompt=["a", "b"]),
    "best_of": served(best_of=2),
    "echo": served(echo=True),
    "logprobs": served(logprobs=2),
    "suffix": refused(suffix="end"),
}

MESSAGES: Table = {
    "messages": served(messages=[HI]),
    "messages[developer]": served(messages=[{"role": "developer", "content": "be brief"}, HI]),
    "messages[developer].content": served(messages=[{"role": "developer", "content": "be brief"}, HI]),
    "messages[developer].name": served(messages=[{"role": "developer", "content": "be brief", "name": "a"}, HI]),
    "messages[system]": served(messages=[{"role": "system", "content": "be brief"}, HI]),
    "messages[system].content": served(messages=[{"role": "system", "content": "be brief"}, HI]),
    "messages[system].name": served(messages=[{"role": "system", "content": "be brief", "name": "a"}, HI]),
    "messages[user]": served(messages=[HI]),
    "messages[user].name": served(messages=[HI | {"name": "a"}]),
    "messages[user].content": served(**user({"type": "text", "text": "a"})),
    "messages[user].content[text]": served(**user({"type": "text", "text": "a"})),
    "messages[user].content[text].text": served(**user({"type": "text", "text": "a"})),
    "messages[user].content[text].prompt_cache_breakpoint": no_effect(**user(CACHED)),
    "messages[user].content[image_url]": refused(**user({"type": "image_url", "image_url": {"url": "data:,"}})),
    "messages[user].content[input_audio]": refused(**user({"type": "input_audio", "input_audio": {"data": ""}})),
    "messages[user].content[file]": refused(**user({"type": "file", "file": {"file_id": "f"}})),
    "messages[assistant]": served(**assistant(content="a")),
    "messages[assistant].audio": refused(**assistant(audio={"id": "a"})),
    "messages[assistant].content": served(**assistant(content="a")),
    "messages[assistant].content[text]": served(**assistant(content=[{"type": "text", "text": "a"}])),
    "messages[assistant].content[text].text": served(**assistant(content=[{"type": "text", "text": "a"}])),
    "messages[assistant].content[text].prompt_cache_breakpoint": no_effect(**assistant(content=[CACHED])),
    "messages[assistant].content[refusal]": served(**assistant(content=[{"type": "refusal", "refusal": "no"}])),
    "messages[assistant].content[refusal].refusal": served(**assistant(content=[{"type": "refusal", "refusal": "no"}])),
    "messages[assistant].function_call": refused(**assistant(function_call={"name": "now", "arguments": "{}"})),
    "messages[assistant].name": served(**assistant(content="a", name="b")),
    "messages[assistant].refusal": served(**assistant(refusal="no")),
    "messages[assistant].tool_calls": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[function]": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[function].id": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[function].function": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[function].function.arguments": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[function].function.name": served(**assistant(tool_calls=[CALL])),
    "messages[assistant].tool_calls[custom]": refused(
        **assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "now", "input": ""}}])
    ),
    "messages[tool]": served(messages=[HI, {"role": "tool", "tool_call_id": "c1", "content": "noon"}]),
    "messages[tool].content": served(messages=[HI, {"role": "tool", "tool_call_id": "c1", "content": "noon"}]),
    "messages[tool].tool_call_id": served(messages=[HI, {"role": "tool", "tool_call_id": "c1", "content": "noon"}]),
    "messages[tool].content.text": served(messages=[{"role": "tool", "content": [{"type": "text", "text": "a"}]}, HI]),
    "messages[tool].content.prompt_cache_breakpoint": no_effect(messages=[{"role": "tool", "content": [CACHED]}, HI]),
    "messages[function]": served(messages=[{"role": "function", "name": "now", "content": "noon"}, HI]),
    "messages[function].content": served(messages=[{"role": "function", "name": "now", "content": "noon"}, HI]),
    "messages[function].name": served(messages=[{"role": "function", "name": "now", "content": "noon"}, HI]),
} | {
    f"messages[{role}].content.{name}": outcome(messages=[{"role": role, "content": [CACHED]}, HI])
    for role in ("developer", "system")
    for name, outcome in (("text", served), ("prompt_cache_breakpoint", no_effect))
}  # fmt: skip

FORMS: Table = {
    "response_format": served(response_format={"type": "json_object"}),
    "response_format[text]": served(response_format={"type": "text"}),
    "response_format[json_object]": served(response_format={"type": "json_object"}),
    "response_format[json_schema]": served(**json_schema()),
    "response_format[json_schema].json_schema": served(**json_schema()),
    "response_format[json_schema].json_schema.schema": served(**json_schema()),
    "response_format[json_schema].json_schema.name": no_effect(**json_schema(name="y")),
    "response_format[json_schema].json_schema.description": no_effect(**json_schema(description="y")),
    "response_format[json_schema].json_schema.strict": no_effect(
        **json_schema(strict=False)
    ),  # the answer always follows the schema
}

TOOLS: Table = {
    "tools": served(tools=[TOOL]),
    "tools[function]": served(tools=[TOOL]),
    "tools[function].function": served(tools=[TOOL]),
    "tools[function].function.name": served(**tool(name="then")),
    "tools[function].function.description": served(**tool(description="x")),
    "tools[function].function.parameters": served(**tool(parameters=SCHEMA)),
    "tools[function].function.strict": no_effect(**tool(strict=False)),
    "tools[custom]": refused(tools=[{"type": "custom", "custom": {"name": "now"}}]),
    "tool_choice": served(tools=[TOOL], tool_choice="auto"),
    "tool_choice=none": served(tools=[TOOL], tool_choice="none"),
    "tool_choice=auto": served(tools=[TOOL], tool_choice="auto"),
    "tool_choice=required": served(tools=[TOOL], tool_choice="required"),
    "tool_choice[function]": served(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "now"}}),
    "tool_choice[function].function": served(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "now"}}
    ),
    "tool_choice[function].function.name": served(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "now"}}
    ),
    "tool_choice[custom]": refused(tools=[TOOL], tool_choice={"type": "custom", "custom": {"name": "now"}}),
    "tool_choice[allowed_tools]": refused(
        tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    ),
    "parallel_tool_calls": served(tools=[TOOL], parallel_tool_calls=False),
    "functions": refused(functions=[FUNCTION]),
    "function_call": refused(function_call={"name": "now"}),
}

CHAT: Table = {
    **BOTH,
    **MESSAGES,
    **FORMS,
    **TOOLS,
    "audio": refused(audio={"format": "wav", "voice": "x"}),
    "logprobs": served(logprobs=True),
    "max_completion_tokens": served(max_completion_tokens=3),
    "metadata": no_effect(metadata={"a": "b"}),
    "modalities": served(modalities=["text"]),
    "modalities=text": served(modalities=["text"]),
    "modalities=audio": refused(modalities=["text", "audio"]),
    "moderation": refused(moderation={"model": "omni-moderation-latest"}),
    "prediction": no_effect(prediction={"type": "content", "content": "hi"}),
    "prompt_cache_key": no_effect(prompt_cache_key="a"),
    "prompt_cache_options": no_effect(prompt_cache_options={"mode": "explicit"}),
    "prompt_cache_retention": no_effect(prompt_cache_retention="24h"),
    "reasoning_effort": served(reasoning_effort="low"),
    **each(
        ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "reasoning_effort={}",
        lambda effort: served(reasoning_effort=effort),
    ),
    "safety_identifier": no_effect(safety_identifier="a"),
    "service_tier": no_effect(service_tier="flex"),
    "store": no_effect(store=True),
    "top_logprobs": served(logprobs=True, top_logprobs=2),
    "verbosity": served(verbosity="medium"),
    "verbosity=medium": served(verbosity="medium"),
    "verbosity=low": refused(verbosity="low"),
    "verbosity=high": refused(verbosity="high"),
    "web_search_options": refused(web_search_options={}),
}
