from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from common.errors import InvalidRequest, ModelError
from common.model_files.files import ModelFiles
from common.model_files.template import ChatTemplate
from common.model_files.tiny import CHAT_TEMPLATE

USER = [{"role": "user", "content": "Hi <b> & 'you'"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "é😀"}, *USER]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<x> & 'é'", "parameters": {"b": 1, "a": None}}}]

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\n' + (first if loop.first else "") + message['content'] | trim }}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}"""

CONVENTIONS = """
{% if tools %}
    {% for tool in tools %}
  {{ tool | tojson }}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ message.content }}{% endgeneration %}

{% endfor %}
{{ unset_variable }}|{{ eos_token }}|{{ strftime_now('%Y') }}
"""


def transformers_render(source: str, messages: Any, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return str(rendered[0])


@pytest.mark.parametrize("messages", [USER, TALK], ids=["user", "talk"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("source", [CHAT_TEMPLATE, GEMMA, CONVENTIONS], ids=["chatml", "gemma", "conventions"])
def test_it_renders_as_transformers_does(source: str, messages: Any, add_generation_prompt: bool, tools: Any) -> None:
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt
    )
    assert ours == transformers_render(
        source,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )


def test_smollm2_adds_its_system_prompt(smollm2_files: ModelFiles) -> None:
    rendered = ChatTemplate.from_files(smollm2_files).render(USER)
    assert rendered == transformers_render(smollm2_files.chat_template or "", USER, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n")


def test_a_base_model_refuses_to_chat() -> None:
    with pytest.raises(InvalidRequest, match="'gemma3-270m' has no chat template"):
        ChatTemplate(None, model_id="gemma3-270m").render(USER)


def test_the_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(GEMMA).render([*USER, *USER])


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "x"}])
def test_bad_messages_are_the_clients_fault(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="The chat template rejects these messages"):
        ChatTemplate(CHAT_TEMPLATE).render([message])


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update(x=1) }}"]
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(USER)


def test_messages_are_data_not_templates() -> None:
    messages = [{"role": "user", "content": "{{ bos_token }}{% if %}"}]
    assert "{{ bos_token }}{% if %}" in ChatTemplate(CHAT_TEMPLATE, bos_token="<s>").render(messages)


def test_extra_variables() -> None:
    template = ChatTemplate("{{ 'think' if enable_thinking else 'answer' }}")
    assert [template.render(USER), template.render(USER, extra={"enable_thinking": True})] == ["answer", "think"]
    with pytest.raises(InvalidRequest, match="must not include messages"):
        template.render(USER, extra={"messages": []})


def test_the_year_is_todays() -> None:
    before = datetime.now().year
    assert before <= int(ChatTemplate("{{ strftime_now('%Y') }}").render(USER)) <= datetime.now().year


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (CHAT_TEMPLATE, ""),
        (GEMMA, ""),
        ("{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}", ""),
        ("x\n{% if %}", "line 2: Expected an expression"),
        ("x\n\n{{ messages | shout }}", "line 3: No filter named 'shout'"),
        (
            "{% macro m() %}\n{{ none.x.y }}{% endmacro %}\n{{ messages[0].content }}\n{{ m() }}",
            "line 2: .* no attribute",
        ),
        ("\n{{ raise_exception('only tools') }}", "line 2: only tools"),
        ("{{ messages[0].role }}", "omits the user's message"),
        ("{{ " + "(" * 9999, "maximum recursion depth"),
    ],
)
def test_why_a_template_is_of_no_use(source: str, problem: str) -> None:
    assert re.search(problem, ChatTemplate.problem_of(source)) and bool(ChatTemplate.problem_of(source)) == bool(
        problem
    )


def test_a_template_with_a_syntax_error_stops_the_start() -> None:
    with pytest.raises(ModelError, match="chat template of m has an error in line 2"):
        ChatTemplate("x\n{% if %}", model_id="m")
