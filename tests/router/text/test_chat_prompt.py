from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from common.errors import InvalidRequest
from common.model_files.resolve import resolve_model
from common.model_files.template import ChatTemplate
from router.text.calls import Function, dialect_of
from router.text.chat_prompt import OPEN_END, chat_prompt

SOURCE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
USER = {"role": "user", "content": "Hi"}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return chat_prompt(ChatTemplate(SOURCE), messages, **options)


def test_parts_are_joined_and_the_generation_prompt_is_added() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}]) == "<user>a\nb</><assistant>"
    assert render([USER], add_generation_prompt=False) == "<user>Hi</>"
    assert render([USER], extra={"mood": "!"}) == "<user>Hi</><assistant>!"


def test_a_final_message_is_left_open() -> None:
    opened = [USER, {"role": "assistant", "content": "Hi Hi"}]
    assert render(opened, add_generation_prompt=False, continue_final_message=True) == "<user>Hi</><assistant>Hi Hi"


def test_both_ways_to_end_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="must not be combined"):
        render([USER], continue_final_message=True)


def test_a_hidden_last_message_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        chat_prompt(template, [USER, USER], add_generation_prompt=False, continue_final_message=True)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages: must contain at least one message"):
        render([])


def test_a_base_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat_prompt(ChatTemplate(None, model_id="base"), [USER])


class Searched(str):
    """A rendered text that no check may search once for each message."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        assert OPEN_END not in part, "each message has the whole text searched"
        return super().__contains__(part)


class Whole(ChatTemplate):
    def render(self, *args: Any, **options: Any) -> str:
        return Searched(super().render(*args, **options))


@pytest.mark.parametrize("hidden", [0, 1, 11, 19, None])
def test_roles_are_checked_in_one_pass(hidden: int | None) -> None:
    template = Whole(
        f"{{% for m in messages %}}{{% if loop.index0 != {hidden} %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    )
    messages = [{"role": "critic", "content": f"{i};"} for i in range(20)]
    if hidden is None:
        assert chat_prompt(template, messages) == "".join(f"{i};" for i in range(20))
    else:
        with pytest.raises(InvalidRequest, match=rf"messages\[{hidden}\].role: .* does not support role 'critic'"):
            chat_prompt(template, messages)


TWO = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
LOOPS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
LOOPS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
)
LOOPS_FOR_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SHOWN_AS_JSON = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (SOURCE, "<user>a\nb</><assistant>Hi</><user>Hi</>"),
        (LOOPS, "<user>[a][b]<assistant>Hi<user>Hi"),
        (LOOPS_ONLY, "<user>[a][b]<assistant>[Hi]<user>[Hi]"),
        (LOOPS_FOR_USERS, "<user>[a][b]<assistant>Hi<user>Hi"),
        (SHOWN_AS_JSON, "<user>a\nb<assistant>Hi<user>Hi"),
    ],
)
def test_a_template_that_reads_parts_joins_them_itself(source: str, shown: str) -> None:
    """As with transformers, which passes lists on. Others get one string, as with vLLM."""
    messages = [{"role": "user", "content": TWO}, {"role": "assistant", "content": "Hi"}, USER]
    assert chat_prompt(ChatTemplate(source), messages, add_generation_prompt=False) == shown


def test_roles_whose_parts_a_template_does_not_read_get_one_string() -> None:
    messages = [{"role": "system", "content": TWO}, {"role": "user", "content": TWO}]
    assert chat_prompt(ChatTemplate(LOOPS_FOR_USERS), messages) == "<system>a\nb<user>[a][b]"


@pytest.mark.parametrize("source", [LOOPS, LOOPS_ONLY])
def test_a_final_message_of_parts_is_left_open(source: str) -> None:
    opened = [USER, {"role": "assistant", "content": TWO}]
    shown = chat_prompt(ChatTemplate(source), opened, add_generation_prompt=False, continue_final_message=True)
    assert shown.endswith("<assistant>[a][b")


def in_transformers(template: str | dict[str, str], messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-random").tokenizer))
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)
    return str(theirs.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize("source", [LOOPS, LOOPS_ONLY, LOOPS_FOR_USERS])
def test_parts_are_shown_as_transformers_shows_them(source: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert chat_prompt(ChatTemplate(source), messages) == in_transformers(source, messages)


CHATML = (  # content as it is, as in Qwen2.5
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)
HEADERS = (  # trimmed, as in Llama 3
    "{% for m in messages %}{{ '<|head|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
)
BRACKETS = (  # trimmed between spaces, as in Llama 2
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
TURNS = (  # strings and parts, both trimmed, as in Gemma 3
    "{% for m in messages %}{{ '<turn>' + m.role + '\n' }}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<end>\n' }}{% endfor %}"
)
THOUGHTS = (  # what follows the thought, as in Qwen3
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)


@pytest.mark.parametrize("begun", ["The answer is", "The answer is ", " The answer:\n\n", "\n\nSo "])
@pytest.mark.parametrize("source", [CHATML, HEADERS, BRACKETS, TURNS, THOUGHTS, LOOPS])
def test_a_begun_answer_is_cut_as_transformers_cuts_it(source: str, begun: str) -> None:
    messages = [USER, {"role": "assistant", "content": begun}]
    ours = chat_prompt(ChatTemplate(source), messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == in_transformers(source, messages, continue_final_message=True)


@pytest.mark.parametrize("source", [TURNS, LOOPS, LOOPS_ONLY])
def test_begun_parts_are_cut_as_transformers_cuts_them(source: str) -> None:
    content = [{"type": "text", "text": "The "}, {"type": "text", "text": "answer "}]
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": content}]
    ours = chat_prompt(ChatTemplate(source), messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == in_transformers(source, messages, continue_final_message=True)


@pytest.mark.parametrize("begun", ["", "  "])
def test_a_blank_answer_leaves_the_header_whole(begun: str) -> None:
    """Unlike in transformers, which cuts the header's line break, too."""
    messages = [USER, {"role": "assistant", "content": begun}]
    ours = chat_prompt(ChatTemplate(TURNS), messages, add_generation_prompt=False, continue_final_message=True)
    assert ours.endswith("<turn>assistant\n")


WITH_TOOLS = (  # as in Hermes 2 Pro: needs tools
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}"
)
LOOK = Function("look", "Look at it.", {"type": "object", "properties": {"at": {"type": "string"}}})
LOOKED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    ]},
    {"role": "tool", "content": "blue", "tool_call_id": "call00001"},
]  # fmt: skip


@pytest.mark.parametrize("messages", [[USER], LOOKED], ids=["user", "calls"])
def test_requests_with_tools_get_the_template_for_tools(messages: list[dict[str, Any]]) -> None:
    both = {"default": CHATML, "tool_use": WITH_TOOLS}
    template = ChatTemplate(CHATML, tool_source=WITH_TOOLS)
    assert chat_prompt(template, [USER]) == in_transformers(both, [USER], add_generation_prompt=True)
    ours = chat_prompt(template, messages, functions=[LOOK])
    assert ours == in_transformers(both, messages, tools=[LOOK.as_tool()], add_generation_prompt=True)


def test_earlier_calls_are_written_in_the_template_without_tools() -> None:
    template = ChatTemplate(CHATML, tool_source=WITH_TOOLS)
    shown = chat_prompt(template, LOOKED, dialect=dialect_of(template.with_tools))
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>' in shown
    assert "<|im_start|>user\n<tool_response>\nblue\n</tool_response><|im_end|>" in shown


def test_a_template_for_tools_whose_calls_are_not_recognised_is_not_used() -> None:
    """It would be rendered without tools, because these are text in the prompt."""
    unknown = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    shown = chat_prompt(ChatTemplate(CHATML, tool_source=unknown), [USER], functions=[LOOK])
    assert shown == chat_prompt(ChatTemplate(CHATML), [USER], functions=[LOOK])
    assert "You can call these functions" in shown


def test_a_template_for_tools_only() -> None:
    template = ChatTemplate(None, tool_source=WITH_TOOLS)
    assert chat_prompt(template, [USER], functions=[LOOK]).endswith("<user>Hi")
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat_prompt(template, [USER])
