"""Every field of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, with its betas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chat import SCHEMA
from .outcome import Table, each, no_effect, refused, served

HI = {"role": "user", "content": "hi"}
CACHE = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "a"}
THOUGHT = {"type": "thinking", "thinking": "a", "signature": ""}
TOOL = {"name": "now", "description": "the time", "input_schema": {"type": "object"}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "now", "input": {}}]}
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [HI, {"role": role, "content": [*blocks]}, HI]}


def result(**members: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "c1", "content": "noon", **members}
    return {"messages": [HI, CALLED, {"role": "user", "content": [block]}]}


def use(**members: Any) -> dict[str, Any]:
    return turn(CALLED["content"][0] | members, role="assistant")  # type: ignore[operator]


def system(**members: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "system", "content": "be brief", **members}, HI]}


def tool(**members: Any) -> dict[str, Any]:
    return {"tools": [TOOL | members]}


def thinks(kind: str, **members: Any) -> dict[str, Any]:
    budget = {"budget_tokens": 1024} if kind == "enabled" else {}
    return {"thinking": {"type": kind, **budget, **members}}


def form(**members: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, **members}}}


def choice(kind: str, **members: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": {"type": kind, **members}}


FOREIGN_BLOCKS = (
    *("image", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
    *("advisor_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result"),
    *("text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result"),
    *("container_upload", "compaction", "tool_addition", "tool_removal", "mcp_tool_listing", "fallback"),
)


DOCUMENTS: dict[str, dict[str, Any]] = {
    "document": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
    "search_result": {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]},
}


def documents(place: str, having: Callable[[dict[str, Any]], dict[str, Any]]) -> Table:
    """Documents and search results in the content `place`; `having` returns a request with a block."""
    document, result = DOCUMENTS["document"], DOCUMENTS["search_result"]
    source = f"{place}[document].source"

    def of(content: Any) -> dict[str, Any]:
        return having({"type": "document", "source": {"type": "content", "content": content}})

    found: Table = {
        f"{place}[document]": served(**having(document)),
        source: served(**having(document)),
        f"{source}[text]": served(**having(document)),
        f"{source}[text].data": served(**having(document)),
        f"{source}[text].media_type": served(**having(document)),
        f"{source}[text].media_type=text/plain": served(**having(document)),
        f"{source}[content]": served(**of("a")),
        f"{source}[content].content": served(**of([TEXT])),
        f"{source}[content].content[text]": served(**of([TEXT])),
        f"{source}[content].content[text].text": served(**of([TEXT])),
        f"{source}[content].content[text].cache_control": no_effect(**of([TEXT | CACHE])),
        f"{source}[content].content[text].citations": no_effect(**of([TEXT | {"citations": []}])),
        f"{source}[content].content[image]": refused(**of([{"type": "image"}])),
        f"{place}[document].title": served(**having(document | {"title": "t"})),
        f"{place}[document].context": served(**having(document | {"context": "c"})),
        f"{place}[search_result]": served(**having(result)),
        f"{place}[search_result].source": served(**having(result)),
        f"{place}[search_result].title": served(**having(result)),
        f"{place}[search_result].content": served(**having(result)),
        f"{place}[search_result].content.text": served(**having(result)),
        f"{place}[search_result].content.cache_control": no_effect(**having(result | {"content": [TEXT | CACHE]})),
        f"{place}[search_result].content.citations": no_effect(
            **having(result | {"content": [TEXT | {"citations": []}]})
        ),
    }
    for kind in ("base64", "url", "file"):
        block = {"type": "document", "source": {"type": kind, "media_type": "application/pdf", "data": ""}}
        found[f"{source}[{kind}]"] = refused(**having(block))
    for kind, block in DOCUMENTS.items():
        found[f"{place}[{kind}].cache_control"] = no_effect(**having(block | CACHE))
        found[f"{place}[{kind}].citations"] = refused(**having(block | {"citations": {"enabled": True}}))
    return found


def reference(**members: Any) -> dict[str, Any]:
    return {**result(content=[{"type": "tool_reference", "tool_name": "now", **members}]), "tools": [TOOL]}


def blocks(role: str) -> Table:
    """The SDK's types allow all blocks for both roles; but calls are the assistant's, and results the user's."""
    place, own = f"messages[{role}].content", "tool_use" if role == "assistant" else "tool_result"
    other = {"assistant": "tool_result", "user": "tool_use"}[role]
    return {
        place: served(**turn(TEXT, role=role)),
        f"{place}[text]": served(**turn(TEXT, role=role)),
        f"{place}[text].text": served(**turn(TEXT, role=role)),
        f"{place}[text].cache_control": no_effect(**turn(TEXT | CACHE, role=role)),
        f"{place}[text].citations": no_effect(**turn(TEXT | {"citations": []}, role=role)),
        **(
            {
                f"{place}[thinking]": served(**turn(THOUGHT, TEXT, role=role)),
                f"{place}[thinking].thinking": served(**turn(THOUGHT, TEXT, role=role)),
                f"{place}[thinking].signature": no_effect(**turn(THOUGHT, TEXT, role=role)),
            }
            if role == "assistant"
            else {f"{place}[thinking]": no_effect(**turn(THOUGHT, TEXT, role=role))}
        ),
        f"{place}[redacted_thinking]": no_effect(**turn(TEXT, {"type": "redacted_thinking", "data": ""}, role=role)),
        f"{place}[{own}]": served(**(use() if role == "assistant" else result())),
        f"{place}[{other}]": refused(**turn({"type": other, "id": "c1", "name": "now", "input": {}}, role=role)),
        **each(FOREIGN_BLOCKS, place + "[{}]", lambda kind: refused(**turn(TEXT, {"type": kind}, role=role))),
        **(
            documents(place, lambda block: turn(block))
            if role == "user"
            else each(DOCUMENTS, place + "[{}]", lambda kind: refused(**turn(DOCUMENTS[kind], role=role)))
        ),
    }


MESSAGES: Table = {
    "messages": served(messages=[HI]),
    "messages[user]": served(messages=[HI]),
    "messages[assistant]": served(**turn(TEXT, role="assistant")),
    **blocks("user"),
    **blocks("assistant"),
    "messages[assistant].content[tool_use].id": served(**use(id="c2")),
    "messages[assistant].content[tool_use].name": served(**use(name="then")),
    "messages[assistant].content[tool_use].input": served(**use(input={"a": 1})),
    "messages[assistant].content[tool_use].cache_control": no_effect(**use(**CACHE)),
    "messages[assistant].content[tool_use].caller": refused(
        **use(caller={"type": "code_execution_20260120", "tool_id": "t"})
    ),
    "messages[assistant].content[tool_use].toolset_name": refused(**use(toolset_name="browser")),
    "messages[user].content[tool_result].tool_use_id": served(**result()),
    "messages[user].content[tool_result].is_error": served(**result(is_error=True)),
    "messages[user].content[tool_result].cache_control": no_effect(**result(**CACHE)),
    "messages[user].content[tool_result].toolset_name": refused(**result(toolset_name="browser")),
    "messages[user].content[tool_result].content": served(**result(content=[TEXT])),
    "messages[user].content[tool_result].content[text]": served(**result(content=[TEXT])),
    "messages[user].content[tool_result].content[text].text": served(**result(content=[TEXT])),
    "messages[user].content[tool_result].content[text].cache_control": no_effect(**result(content=[TEXT | CACHE])),
    "messages[user].content[tool_result].content[text].citations": no_effect(
        **result(content=[TEXT | {"citations": []}])
    ),
    **each(
        ("image", "browser_state"),
        "messages[user].content[tool_result].content[{}]",
        lambda kind: refused(**result(content=[{"type": kind}])),
    ),
    **documents("messages[user].content[tool_result].content", lambda block: result(content=[block])),
    "messages[user].content[tool_result].content[tool_reference]": served(**reference()),
    "messages[user].content[tool_result].content[tool_reference].tool_name": served(**reference()),
    "messages[user].content[tool_result].content[tool_reference].cache_control": no_effect(**reference(**CACHE)),
    "messages[system]": served(**system()),
    "messages[system].content": served(**system()),
    "messages[system].content.text": served(**system(content=[TEXT])),
    "messages[system].content.cache_control": no_effect(**system(content=[TEXT | CACHE])),
    "messages[system].content.citations": no_effect(**system(content=[TEXT | {"citations": []}])),
    "messages[system].content[text]": served(**system(content=[TEXT])),
    "messages[system].content[text].text": served(**system(content=[TEXT])),
    "messages[system].content[text].cache_control": no_effect(**system(content=[TEXT | CACHE])),
    "messages[system].content[text].citations": no_effect(**system(content=[TEXT | {"citations": []}])),
    "messages[system].content[tool_addition]": refused(**system(content=[{"type": "tool_addition"}])),
    "messages[system].content[tool_removal]": refused(**system(content=[{"type": "tool_removal"}])),
    "messages[system].clear_at": served(**system(clear_at="never")),
    "messages[system].clear_at=never": served(**system(clear_at="never")),
    "messages[system].clear_at=next_user_message": refused(**system(clear_at="next_user_message")),
    "messages[system].output_config": refused(**system(output_config={"effort": "low"})),
    "system": served(system="be brief"),
    "system.text": served(system=[TEXT]),
    "system.cache_control": no_effect(system=[TEXT | CACHE]),
    "system.citations": no_effect(system=[TEXT | {"citations": []}]),
}

TOOLS: Table = {
    "tools": served(tools=[TOOL]),
    "tools[custom]": served(**tool(type="custom")),
    "tools[custom].name": served(**tool(name="then")),
    "tools[custom].description": served(**tool(description="x")),
    "tools[custom].input_schema": served(**tool(input_schema=SCHEMA)),
    "tools[custom].strict": no_effect(**tool(strict=False)),  # calls always follow the schema
    "tools[custom].cache_control": no_effect(**tool(**CACHE)),
    "tools[custom].eager_input_streaming": no_effect(**tool(eager_input_streaming=False)),
    "tools[custom].input_examples": refused(**tool(input_examples=[{"a": 1}])),
    "tools[custom].defer_loading": served(**tool(defer_loading=True)),
    "tools[custom].allowed_callers": refused(**tool(allowed_callers=["code_execution_20260120"])),
    **each(
        (
            *("bash_20241022", "bash_20250124", "code_execution_20250522", "code_execution_20250825"),
            *("code_execution_20260120", "code_execution_20260521", "browser_toolset_20260801", "computer_20241022"),
            *("memory_20250818", "computer_20250124", "text_editor_20241022", "computer_20251124"),
            *("computer_toolset_20260801", "text_editor_20250124", "text_editor_20250429", "text_editor_20250728"),
            *("web_search_20250305", "web_fetch_20250910", "web_search_20260209", "web_fetch_20260209"),
            *("web_fetch_20260309", "web_search_20260318", "web_fetch_20260318", "advisor_20260301"),
            *("tool_search_tool_bm25_20251119", "tool_search_tool_bm25", "tool_search_tool_regex_20251119"),
            *("tool_search_tool_regex", "mcp_toolset"),
        ),
        "tools[{}]",
        lambda kind: refused(tools=[{"type": kind}]),
    ),
    "tool_choice": served(**choice("auto")),
    "tool_choice[none]": served(**choice("none")),
    "tool_choice[auto]": served(**choice("auto")),
    "tool_choice[auto].disable_parallel_tool_use": served(**choice("auto", disable_parallel_tool_use=True)),
    "tool_choice[any]": served(**choice("any")),
    "tool_choice[any].disable_parallel_tool_use": served(**choice("any", disable_parallel_tool_use=True)),
    "tool_choice[tool]": served(**choice("tool", name="now")),
    "tool_choice[tool].name": served(**choice("tool", name="now")),
    "tool_choice[tool].disable_parallel_tool_use": served(**choice("tool", name="now", disable_parallel_tool_use=True)),
}

THINKING: Table = {
    "thinking": served(**thinks("adaptive")),
    "thinking[disabled]": served(**thinks("disabled")),
    "thinking[between_tools]": refused(**thinks("between_tools")),
    "thinking[enabled]": served(**thinks("enabled")),
    "thinking[enabled].budget_tokens": no_effect(**thinks("enabled")),  # a target; max_tokens bounds it all
    **{
        f"thinking[{kind}].{name}": outcome(**thinks(kind, **members))
        for kind in ("enabled", "adaptive")
        for name, outcome, members in (
            ("display", served, {"display": "summarized"}),
            ("display=summarized", served, {"display": "summarized"}),
            ("display=omitted", served, {"display": "omitted"}),
            ("display=updates", refused, {"display": "updates"}),
            ("block_binding", no_effect, {"block_binding": {"prefix_mismatch_behavior": "error"}}),  # never shown again
        )
    },
    "thinking[adaptive]": served(**thinks("adaptive")),
    "output_config": served(**form()),
    "output_config.format": served(**form()),
    "output_config.format.schema": served(**form()),
    "output_config.effort": served(output_config={"effort": "low"}),
    **each(EFFORTS, "output_config.effort={}", lambda effort: served(output_config={"effort": effort})),
    "output_config.task_budget": refused(output_config={"task_budget": {"type": "tokens", "total": 10000}}),
}

COUNT_TOKENS: Table = {
    **MESSAGES,
    **TOOLS,
    **THINKING,
    "model": served(model="tiny-random"),
    "billing_policy": no_effect(billing_policy={"type": "billing_policy", "bill_to": "self"}),
    "cache_control": no_effect(cache_control={"type": "ephemeral"}),
    "compaction": refused(compaction={"type": "summarize"}),
    "context_management": refused(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "mcp_servers": refused(mcp_servers=[{"type": "url", "name": "x", "url": "https://x"}]),
    "speed": no_effect(speed="fast"),
    "user_profile_id": no_effect(user_profile_id="a"),
    "workspace_id": no_effect(workspace_id="a"),
    "betas": no_effect(betas=["message-threads-2026-08-12"]),  # a header
}

ANTHROPIC: Table = {
    **COUNT_TOKENS,
    "max_tokens": served(max_tokens=3),
    "container": refused(container={"skills": []}),
    "diagnostics": no_effect(diagnostics={"previous_message_id": None}),
    "fallback_credit_token": no_effect(fallback_credit_token="a"),
    "fallbacks": no_effect(fallbacks=[{"model": "x"}]),  # only for models that refuse to answer
    "inference_geo": no_effect(inference_geo="us"),
    "metadata": no_effect(metadata={"user_id": "me"}),
    "service_tier": no_effect(service_tier="auto"),
    "stop_sequences": served(stop_sequences=["x"]),
    "stream": served(stream=True),
    "stream=true": served(stream=True),
    "thread": refused(thread={"type": "create"}),
}
