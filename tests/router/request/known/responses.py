"""Every field of OpenAI's `POST /v1/responses`."""

from __future__ import annotations

from typing import Any

from .chat import SCHEMA
from .outcome import Table, each, no_effect, refused, served

STORED = "resp_known"
"""A response that the tests of these tables store first."""
HI = {"role": "user", "content": "hi"}
TEXT = {"type": "input_text", "text": "a"}
CACHED = TEXT | {"prompt_cache_breakpoint": {"mode": "explicit"}}
SAID = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True, "description": "time"}
GROUP = {"type": "namespace", "name": "clock", "description": "times", "tools": [TOOL]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "id": "i", "status": "completed"}
CAME = {"type": "function_call_output", "call_id": "c1", "output": "noon", "id": "i", "status": "completed"}
DIRECT, PROGRAM = {"type": "direct"}, {"type": "program", "caller_id": "p"}


def said(*parts: Any, role: str = "user", **members: Any) -> dict[str, Any]:
    return {"input": [{"type": "message", "role": role, "content": [*parts], **members}, HI]}


def called(**members: Any) -> dict[str, Any]:
    return {"input": [HI, CALLED | members, CAME]}


def came(**members: Any) -> dict[str, Any]:
    return {"input": [HI, CALLED, CAME | members]}


def thought() -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": "a"}]
    item = {"type": "reasoning", "id": "r", "summary": [], "content": content, "status": "completed"}
    return {"input": [HI, item | {"encrypted_content": "x"}, CALLED, CAME]}


def tool(**members: Any) -> dict[str, Any]:
    return {"tools": [TOOL | members]}


def grouped(**members: Any) -> dict[str, Any]:
    return {"tools": [GROUP | {"tools": [TOOL | members]}]}


def form(**members: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, **members}}}


INPUT: Table = {
    "input": served(input="hi"),
    "input[message]": served(**said(TEXT)),
    "input[message].content": served(**said(TEXT)),
    "input[message].content[input_text]": served(**said(TEXT)),
    "input[message].content[input_text].text": served(**said(TEXT)),
    "input[message].content[input_text].prompt_cache_breakpoint": no_effect(**said(CACHED)),
    "input[message].content[input_image]": refused(**said({"type": "input_image", "image_url": "data:,"})),
    "input[message].content[input_file]": refused(**said({"type": "input_file", "file_id": "f"})),
    "input[message].content[output_text]": served(**said(SAID, role="assistant")),
    "input[message].content[output_text].text": served(**said(SAID, role="assistant")),
    "input[message].content[output_text].annotations": no_effect(**said(SAID, role="assistant")),
    "input[message].content[output_text].logprobs": no_effect(**said(SAID, role="assistant")),
    "input[message].content[refusal]": refused(**said({"type": "refusal", "refusal": "no"}, role="assistant")),
    "input[message].phase": no_effect(**said(SAID, role="assistant", phase="commentary")),
    "input[message].status": no_effect(**said(SAID, role="assistant", status="completed")),
    "input[message].id": no_effect(**said(SAID, role="assistant", id="msg_1")),
    "input[function_call]": served(**called()),
    "input[function_call].arguments": served(**called()),
    "input[function_call].call_id": served(**called()),
    "input[function_call].name": served(**called()),
    "input[function_call].id": no_effect(**called()),
    "input[function_call].status": no_effect(**called()),
    "input[function_call].async": refused(**called(**{"async": True})),
    "input[function_call].caller": refused(**called(caller=PROGRAM)),
    "input[function_call].namespace": served(**called(namespace="x")),
    "input[function_call_output]": served(**came()),
    "input[function_call_output].call_id": served(**came()),
    "input[function_call_output].output": served(**came(output=[TEXT])),
    "input[function_call_output].output[input_text]": served(**came(output=[TEXT])),
    "input[function_call_output].output[input_text].text": served(**came(output=[TEXT])),
    "input[function_call_output].output[input_text].prompt_cache_breakpoint": no_effect(**came(output=[CACHED])),
    "input[function_call_output].output[input_image]": refused(**came(output=[{"type": "input_image"}])),
    "input[function_call_output].output[input_file]": refused(**came(output=[{"type": "input_file"}])),
    "input[function_call_output].id": no_effect(**came()),
    "input[function_call_output].status": no_effect(**came()),
    "input[function_call_output].name": no_effect(**came(name="now")),
    "input[function_call_output].caller": refused(**came(caller=PROGRAM)),
    "input[function_call_output].namespace": no_effect(**came(namespace="x")),  # the call has it
    "input[reasoning]": served(**thought()),
    "input[reasoning].content": served(**thought()),
    "input[reasoning].content.text": served(**thought()),
    **each(
        ("id", "summary", "status", "encrypted_content"), "input[reasoning].{}", lambda name: no_effect(**thought())
    ),
    **each(
        (
            *("file_search_call", "computer_call", "computer_call_output", "web_search_call", "tool_search_call"),
            *("tool_search_output", "additional_tools", "configuration_update", "compaction", "image_generation_call"),
            *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call"),
            *("shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_list_tools"),
            *("mcp_approval_request", "mcp_approval_response", "mcp_call", "custom_tool_call_output"),
            *("custom_tool_call", "compaction_trigger", "item_reference", "program", "program_output"),
        ),
        "input[{}]",
        lambda kind: refused(input=[HI, {"type": kind, "id": "x"}]),
    ),
}

TOOLS: Table = {
    "tools": served(tools=[TOOL]),
    "tools[function]": served(tools=[TOOL]),
    "tools[function].name": served(**tool(name="then")),
    "tools[function].parameters": served(**tool(parameters=SCHEMA)),
    "tools[function].description": served(**tool(description="x")),
    "tools[function].strict": no_effect(**tool(strict=False)),
    "tools[function].async": refused(**tool(**{"async": True})),
    "tools[function].defer_loading": refused(**tool(defer_loading=True)),
    "tools[function].allowed_callers": refused(**tool(allowed_callers=["programmatic"])),
    "tools[function].output_schema": no_effect(**tool(output_schema={"type": "string"})),  # for programmatic callers
    **each(
        (
            *("file_search", "web_search", "web_search_2025_08_26", "mcp", "code_interpreter", "image_generation"),
            *("tool_search", "web_search_preview", "web_search_preview_2025_03_11"),
        ),
        "tools[{}]",
        lambda kind: no_effect(tools=[{"type": kind, "name": "x"}]),  # left out, and the answer says so
    ),
    **each(
        (
            *("computer", "computer_use_preview", "programmatic_tool_calling", "local_shell", "shell", "custom"),
            "apply_patch",
        ),
        "tools[{}]",
        lambda kind: refused(tools=[{"type": kind, "name": "x"}]),
    ),
    "tools[namespace]": served(tools=[GROUP]),
    "tools[namespace].name": served(tools=[GROUP]),
    "tools[namespace].tools": served(tools=[GROUP]),
    "tools[namespace].description": no_effect(tools=[GROUP | {"description": "x"}]),
    "tools[namespace].tools[function]": served(tools=[GROUP]),
    "tools[namespace].tools[function].name": served(**grouped(name="then")),
    "tools[namespace].tools[function].parameters": served(**grouped(parameters=SCHEMA)),
    "tools[namespace].tools[function].description": served(**grouped(description="x")),
    "tools[namespace].tools[function].strict": no_effect(**grouped(strict=False)),
    "tools[namespace].tools[function].async": refused(**grouped(**{"async": True})),
    "tools[namespace].tools[function].defer_loading": refused(**grouped(defer_loading=True)),
    "tools[namespace].tools[function].allowed_callers": refused(**grouped(allowed_callers=["programmatic"])),
    "tools[namespace].tools[function].output_schema": no_effect(**grouped(output_schema={"type": "string"})),
    "tools[namespace].tools[custom]": refused(tools=[GROUP | {"tools": [{"type": "custom", "name": "x"}]}]),
    "tool_choice": served(tools=[TOOL], tool_choice="auto"),
    **each(("none", "auto", "required"), "tool_choice={}", lambda choice: served(tools=[TOOL], tool_choice=choice)),
    "tool_choice[function]": served(tools=[TOOL], tool_choice={"type": "function", "name": "now"}),
    "tool_choice[function].name": served(tools=[TOOL], tool_choice={"type": "function", "name": "now"}),
    **each(
        (
            *("allowed_tools", "file_search", "web_search_preview", "computer", "computer_use_preview"),
            *("computer_use", "web_search_preview_2025_03_11", "image_generation", "code_interpreter", "mcp", "custom"),
            *("programmatic_tool_calling", "apply_patch", "shell"),
        ),
        "tool_choice[{}]",
        lambda kind: refused(tools=[TOOL], tool_choice={"type": kind, "name": "now"}),
    ),
    "parallel_tool_calls": served(tools=[TOOL], parallel_tool_calls=False),
    "max_tool_calls": no_effect(max_tool_calls=1),  # only for tools of the server, which has none
}

TEXTS: Table = {
    "text": served(text={"format": {"type": "json_object"}}),
    "text.format": served(text={"format": {"type": "json_object"}}),
    "text.format[text]": served(text={"format": {"type": "text"}}),
    "text.format[json_object]": served(text={"format": {"type": "json_object"}}),
    "text.format[json_schema]": served(**form()),
    "text.format[json_schema].schema": served(**form()),
    "text.format[json_schema].name": no_effect(**form(name="y")),
    "text.format[json_schema].description": no_effect(**form(description="y")),
    "text.format[json_schema].strict": no_effect(**form(strict=False)),
    "text.verbosity": served(text={"verbosity": "medium"}),
    "text.verbosity=medium": served(text={"verbosity": "medium"}),
    "text.verbosity=low": refused(text={"verbosity": "low"}),
    "text.verbosity=high": refused(text={"verbosity": "high"}),
}

REASONING: Table = {
    "reasoning": served(reasoning={"effort": "low"}),
    "reasoning.effort": served(reasoning={"effort": "low"}),
    **each(
        ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "reasoning.effort={}",
        lambda effort: served(reasoning={"effort": effort}),
    ),
    "reasoning.mode": refused(reasoning={"mode": "pro"}),
    "reasoning.context": served(reasoning={"context": "auto"}),
    "reasoning.context=auto": served(reasoning={"context": "auto"}),
    "reasoning.context=current_turn": served(reasoning={"context": "current_turn"}),
    "reasoning.context=all_turns": refused(reasoning={"context": "all_turns"}),
    "reasoning.summary": served(reasoning={"summary": "auto"}),
    "reasoning.summary=auto": served(reasoning={"summary": "auto"}),
    "reasoning.summary=concise": refused(reasoning={"summary": "concise"}),
    "reasoning.summary=detailed": refused(reasoning={"summary": "detailed"}),
    "reasoning.generate_summary": served(reasoning={"generate_summary": "auto"}),
    "reasoning.generate_summary=auto": served(reasoning={"generate_summary": "auto"}),
    "reasoning.generate_summary=concise": refused(reasoning={"generate_summary": "concise"}),
    "reasoning.generate_summary=detailed": refused(reasoning={"generate_summary": "detailed"}),
}

RESPONSES: Table = {
    **INPUT,
    **TOOLS,
    **TEXTS,
    **REASONING,
    "access_programs": no_effect(access_programs={"cyber": "standard"}),
    "background": served(background=True),
    "background_options": no_effect(background_options={"completion_window": "2h"}),
    "context_management": refused(context_management=[{"type": "compaction", "compact_threshold": 1000}]),
    "conversation": refused(conversation="conv_1"),
    "image": no_effect(image={"context_compression": "auto"}),  # images are refused themselves
    "include": served(include=["message.output_text.logprobs"]),
    "include=message.output_text.logprobs": served(include=["message.output_text.logprobs"]),
    **each(
        (
            *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
            *(
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ),
            *("reasoning.encrypted_content",),
        ),
        "include={}",
        lambda name: no_effect(include=[name]),  # of items that no response has
    ),
    "instructions": served(instructions="be brief"),
    "max_output_tokens": served(max_output_tokens=3),
    "metadata": no_effect(metadata={"a": "b"}),
    "model": served(model="tiny-random"),
    "moderation": refused(moderation={"model": "omni-moderation-latest"}),
    "previous_response_id": served(previous_response_id=STORED),
    "prompt": refused(prompt={"id": "p"}),
    "prompt_cache_key": no_effect(prompt_cache_key="a"),
    "prompt_cache_options": no_effect(prompt_cache_options={"mode": "explicit"}),
    "prompt_cache_retention": no_effect(prompt_cache_retention="24h"),
    "safety_identifier": no_effect(safety_identifier="a"),
    "service_tier": no_effect(service_tier="flex"),
    "store": served(store=False),
    "stream": served(stream=True),
    "stream=true": served(stream=True),
    "stream_options": no_effect(stream=True, stream_options={"include_obfuscation": True}),
    "temperature": served(temperature=0.5),
    "top_logprobs": served(top_logprobs=2),
    "top_p": served(top_p=0.5),
    "truncation": served(truncation="disabled"),
    "truncation=disabled": served(truncation="disabled"),
    "truncation=auto": refused(truncation="auto"),
    "user": no_effect(user="me"),
}
