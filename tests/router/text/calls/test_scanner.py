"""Each format's scanner finds the same parts in a whole answer, in two pieces, and character by character."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.text.calls import scanner
from router.text.calls.format import CallFormat, Function
from router.text.calls.harmony import HarmonyFormat
from router.text.calls.scanner import MAX_REST_CHARS
from router.text.calls.tagged import as_json, reader_of
from router.text.parts import CallPart, Part, TextPart, ThoughtPart, first_mark, joined

from ....examples import FULL, examples
from .formats import AT_ONCE, UNTYPED, WITHOUT_CHANNELS

NAMES = ("now", "get_weather")
CITY = {"city": {"type": "string"}, "days": {"type": "array"}}
FUNCTIONS = {"now": Function("now"), "get_weather": Function("get_weather", None, {"properties": CITY})}
WEATHER, NOW = ("get_weather", '{"city": "Paris", "days": [1, 2]}'), ("now", "{}")
Item = str | tuple[str, str] | ThoughtPart


def parts_of(form: CallFormat, pieces: Sequence[str], *, cut: bool = False, **options: Any) -> list[Part]:
    scanner = form.scanner(**{"start": 0, "only_calls": False, "functions": FUNCTIONS} | options)
    parts = [part for piece in pieces for part in scanner.push(piece)] + scanner.flush(cut=cut)
    assert scanner.num_calls == sum(isinstance(part, CallPart) and bool(part.name) for part in parts)
    text = "".join(pieces)
    assert all(text[part.start :].startswith(part.text) for part in parts if isinstance(part, TextPart))
    return joined(parts)


def taken_apart(form: CallFormat, text: str, **options: Any) -> list[Item]:
    """Return the items of an answer, which must be equal in two pieces and character by character.

    The profile "quick" cuts it at a tenth of the positions.
    """
    parts = parts_of(form, [text], **options)
    assert parts_of(form, list(text), **options) == parts
    for place in range(1, len(text), FULL // settings().max_examples):
        assert parts_of(form, [text[:place], text[place:]], **options) == parts, text[:place]
    return [
        (part.name, part.arguments) if isinstance(part, CallPart) else part.text if isinstance(part, TextPart) else part
        for part in parts
    ]


@pytest.fixture(params=WITHOUT_CHANNELS)
def form(request: pytest.FixtureRequest) -> CallFormat:
    return WITHOUT_CHANNELS[request.param]


def test_calls(form: CallFormat) -> None:
    assert taken_apart(form, form.written([WEATHER])) == [WEATHER]
    assert taken_apart(form, form.written([WEATHER, NOW, WEATHER])) == [WEATHER, NOW, WEATHER]
    assert taken_apart(form, form.written([NOW, WEATHER]), only_calls=True) == [NOW, WEATHER]


def test_text_around_calls(form: CallFormat) -> None:
    one, two = form.written([WEATHER]), form.written([NOW])
    assert taken_apart(form, f"I look.\n{one}") == ["I look.\n", WEATHER]
    assert taken_apart(form, f"a\n{one}\n b\n{two} c") == ["a\n", WEATHER, "b\n", NOW, "c"]
    assert taken_apart(form, f"{one}\n\nDone.\n") == [WEATHER, "Done.\n"]


def test_text_without_calls(form: CallFormat) -> None:
    for text in ("", "Hi!", "a [b] {c} <d>", '{"name": "Bob"}', "[f(x)] [1, 2]", "<|x|>", "[TOOL", "<tool_", "1 <"):
        assert taken_apart(form, text) == [*filter(None, [text])]


def test_json_in_place_of_calls_is_text(form: CallFormat) -> None:
    call = form.written([NOW])
    for text in (json.dumps({"a": call}), "<b>", call[:1]):
        assert taken_apart(form, text, only_calls=True) == [text]
    assert taken_apart(form, call[:1], only_calls=True, cut=True) == []


@pytest.mark.slow_except("hermes", "granite", "llama3", "pythonic", "glm", "glm4", "gemma4")
def test_a_call_that_breaks_off_before_its_arguments_is_text_unless_the_answer_was_cut_off(form: CallFormat) -> None:
    whole = form.written([WEATHER])
    begun = whole.index("city") - (2 if '{"' in whole else 0)
    for end in range(1, begun):
        assert taken_apart(form, whole[:end]) == [whole[:end]]
        assert taken_apart(form, "Hm\n" + whole[:end], cut=True) in (["Hm\n"], ["Hm\n", ("get_weather", "")])


def test_a_call_that_is_cut_off_has_the_arguments_that_came(form: CallFormat) -> None:
    whole = form.written([WEATHER])
    scanner = form.scanner(start=0, only_calls=False, functions=FUNCTIONS)
    (call,) = joined(scanner.push(whole[: whole.index("days")]) + scanner.flush(cut=True))
    assert isinstance(call, CallPart) and call.name == "get_weather"
    assert call.arguments.startswith('{"city": "Paris"') and not scanner.calls_are_whole


@pytest.mark.slow_except("pythonic")
def test_a_complete_call_is_whole_wherever_the_rest_is_cut_off(form: CallFormat) -> None:
    both = form.written([NOW, WEATHER])
    for end in range(len(both)):
        items = taken_apart(form, both[:end], cut=True)
        assert items == [] or items[0] in (NOW, ("now", ""), ("now", "{"))
        assert all(not isinstance(item, str) for item in items)


MALFORMED = {
    "hermes": ["<tool_call>\nget_weather\n</tool_call>", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'],
    "llama3": [
        '{"name": "then", "parameters": {}}',
        '{"name": "now", "parameters": 1}',
        "<|python_tag|>print(1)",
        '{"parameters": {}, "name": "now"}',
    ],
    "mistral": ["[TOOL_CALLS] []", "[TOOL_CALLS] now", '[TOOL_CALLS] [{"now": {}}]', "[TOOL_CALLS]now[ARGS]1"],
    "pythonic": [
        "[then()]",
        "[now(5)]",
        "[now(a=b)]",
        "[now(a=__import__('os'))]",
        "[now(a=1 b=2)]",
        "[now(a=1, a=2)]",
        "[now(a=[1)]",
        "[get_weather(city='x'",
        "<function_calls>\nthen()\n</function_calls>",
        r"[now(a='\ud800')]",
        "[now(a=1e999)]",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>x<｜tool▁call▁end｜>",
    ],
    "qwen3-coder": [
        "<tool_call>\n<function=now>\nso",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<function=>",
        "<function=now",
    ],
    "glm": ["<tool_call>now and then</tool_call>", '<tool_call>{"name": "now"}</tool_call>', "<arg_key>a</arg_key>"],
    "kimi": ["<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "granite": ["<|tool_call|>now", '<|tool_call|>["now"]', '<|tool_call|>[{"name": "now"}]'],
    "phi4-mini": ["functools", "<|tool_call|>[]<|/tool_call|>"],
    "command": ["<|START_ACTION|>[]<|END_ACTION|>", '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>'],
    "internlm": ["<|action_start|><|interpreter|>\nprint(1)<|action_end|>"],
    "xlam": ['[{"name": "then", "arguments": {}}]', '[{"name": "now"}]', "```json\n[1]\n```"],
    "solar": ["<|tool_calls|><|calls|>", "<|tool_call:begin|>x<|tool_call:name|>now"],
    "glm4": ["now {}", "right now\n{}", "then\n{}", "now\nnow"],
    "lfm2": ["<|tool_call_start|>[then()]<|tool_call_end|>", "<|tool_call_start|>[now(1)]<|tool_call_end|>", "[now()]"],
    "deepseek-v3.2": ["<｜DSML｜function_calls>now</｜DSML｜function_calls>"],
    "gemma4": ["<|tool_call>call:then", "<|tool_call>call:now", "<|tool_call>call:now{a b}<tool_call|>", "call:now{}"],
    "minimax": ["<minimax:tool_call>now</minimax:tool_call>", '<invoke name="now">\n</invoke>'],
}


def test_long_texts_full_of_openings_are_searched_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads slowly gets many tokens at once."""
    lengths: list[int] = []

    def counted(text: str, marks: Iterable[str]) -> tuple[int, str]:
        lengths.append(len(text))
        return first_mark(text, marks)

    monkeypatch.setattr(scanner, "first_mark", counted)
    assert parts_of(WITHOUT_CHANNELS["xlam"], ["[" * 8192]) == [TextPart("[" * 8192)]
    assert sum(lengths) < 8192 * 1024


def test_arguments_before_the_name_may_be_long() -> None:
    given = json.dumps({"a": "x" * 20_000})
    answer = f'<|tool_call|>[{{"arguments": {given}, "name": "now"}}]'
    (call,) = parts_of(WITHOUT_CHANNELS["granite"], [answer[i : i + 1000] for i in range(0, len(answer), 1000)])
    assert call == CallPart(0, "now", given)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_what_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    for answer in (text, f"Hm {text} so."):
        assert taken_apart(WITHOUT_CHANNELS[name], answer) == [answer]


DSML_BEGUN = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
DSML_END = "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
PARIS, IN_PARIS = "<parameter=city>Paris</parameter>", ("get_weather", '{"city": "Paris"}')
TRICKY = json.dumps({"a": '}\n</tool_call>"\\', "b": [{"c": "{"}], "d": {}})
VARIANTS: list[tuple[str, str, list[Item]]] = [
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {TRICKY}}}</tool_call>', [("now", TRICKY)]),
    ("hermes", '<<tool_call>{"name": "now", "arguments": {}}</tool_call>', ["<", NOW]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_call> ok', [NOW, "ok"]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}} what?', [NOW, "} what?"]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [NOW]),
    ("llama3", '\n{ "name" : "now", "arguments": {} };\n{"name": "now", "parameters": {}}', ["\n", NOW, NOW]),
    ("llama3", '{"name": "now", "parameters": {}}; {"name": "Bob"}', [NOW, '; {"name": "Bob"}']),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [NOW]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", [NOW]),
    ("mistral", "[TOOL_CALLS]now{}[TOOL_CALLS]now {}", [NOW, NOW]),
    ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', [NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", [NOW]),
    ("pythonic", "[[now()]", ["[", NOW]),
    ("pythonic", "[now( ) ,\n get_weather( city = 'a\\'b' , )]", [NOW, ("get_weather", '{"city": "a\'b"}')]),
    (
        "pythonic",
        "[now(a=True, b=None, c=-1.5, d=(1, 'x'), e={'k': [null, false]}, f=\"é\\u00e9\\n\", g='''a'b''')]",
        [("now", '{"a": true, "b": null, "c": -1.5, "d": [1, "x"], "e": {"k": [null, false]}, '
                 '"f": "éé\\n", "g": "a\'b"}')],
    ),
    ("pythonic", r"""[now(a="\²\٣\8\7", b='\x31')]""", [("now", r'{"a": "\\²\\٣\\8\u0007", "b": "1"}')]),
    ("pythonic", f"[now(a={'1' * 400})]", [("now", f'{{"a": {"1" * 400}}}')]),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [NOW]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁calls▁end｜>",
        [NOW],
    ),
    ("qwen3-coder", "<function=now>\n</function>\n</tool_call>", [NOW]),
    ("qwen3-coder", f"<tool_call><function=get_weather>{PARIS}</function></tool_call>", [IN_PARIS]),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call> so",
     [NOW, NOW, "so"]),
    ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n a\n<b> \n\n</parameter>\n"
                    "<parameter=days>\n[]\n</parameter>\n</function>\n</tool_call>",
     [("get_weather", '{"city": "\\n a\\n<b> \\n", "days": []}')]),
    ("qwen3-coder", f"<tool_call><function=get_weather>{PARIS}{PARIS}</function></tool_call>", [IN_PARIS]),
    ("qwen3-coder", "<tool_call>\n<function=now>\n<parameter=a>\n['x', None]\n</parameter>\n</function>\n</tool_call>",
     [("now", '{"a": ["x", null]}')]),
    ("qwen3-coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\nwhat?",
     [("now", '{"a": 1}'), "what?"]),
    ("glm", "<tool_call>now</tool_call>", [NOW]),
    ("glm", "<tool_call>now\n<arg_key>a</arg_key><arg_value>True</arg_value></tool_call>", [("now", '{"a": true}')]),
    ("minimax", '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>', [NOW]),
    ("kimi", "<|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [NOW]),
    ("granite", '<|tool_call|> [\n  {"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]\nso',
     [NOW, NOW, "so"]),
    ("granite", '<tool_call>[{"arguments": {"a": "}\\""}, "name": "now"}, {"arguments": {}, "name": "now"}]',
     [("now", '{"a": "}\\""}'), NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "id": 1}', ['<tool_call>{"arguments": {}, "id": 1}']),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}, {"arguments": {}, "name": "now"}, '
                '{"name": "now", "arguments": {}}]', [NOW, NOW, NOW]),
    ("command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}, '
                '{"tool_name": "now", "parameters": {}}]<|END_ACTION|>', [NOW, NOW]),
    ("phi4-mini", 'functools[{"name": "now", "arguments": {}}] ok', [NOW, "ok"]),
    ("phi4-mini", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', [NOW]),
    ("command", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>', [NOW]),
    ("command, fenced", 'Action: ```json\n[{"tool_name": "now", "parameters": {}}]\n```', [NOW]),
    ("command", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>\n<', [NOW, "<"]),
    ("internlm", '<|action_start|> <|plugin|>{"name": "now", "arguments": {}}<|action_end|>', [NOW]),
    ("xlam", '```json\n[{"name": "now", "arguments": {}}]\n```', [NOW]),
    ("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [NOW]),
    ("solar", "assistant<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
     [NOW]),
    ("solar", "So<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>now"
              "<|tool_call:args|>{}<|tool_call:end|><|calls|>", ["So", NOW]),
    ("glm4", "Hm<|assistant|>now \n{}<|assistant|>now\n{}", ["Hm", NOW, NOW]),
    ("lfm2", "<|tool_call_start|>[now(), get_weather(city='it\\'s')]<|tool_call_end|> so",
     [NOW, ("get_weather", '{"city": "it\'s"}'), "so"]),
    ("deepseek-v3.2", DSML_BEGUN + '<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n'
                      '<｜DSML｜parameter name="days" string="true">[1]</｜DSML｜parameter>' + DSML_END,
     [("get_weather", '{"city": "3", "days": [1]}')]),
    ("gemma4", "<|tool_call>call:now{a:1.5,b:[true,<|\"|>x, {}<|\"|>],c:{d:None}, e: word}<tool_call|>",
     [("now", '{"a": 1.5, "b": [true, "x, {}"], "c": {"d": null}, "e": "word"}')]),
    ("gemma4", r'<|tool_call>call:now{a:"\ud83d",b:"\ud83d\ude00"}<tool_call|>',
     [("now", r'{"a": "\"\\ud83d\"", "b": "😀"}')]),
    ("gemma4", "<|tool_call>:now{}<tool_call|><|tool_call>call:now{}<tool_call|>", [NOW, NOW]),
    ("functiongemma", "<start_function_call>call:get_weather{days:<escape>[1]<escape>}<end_function_call>",
     [("get_weather", '{"days": [1]}')]),
    ("kimi", "<|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}<|tool_call_end|>", [NOW]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), VARIANTS)
def test_other_ways_to_write_calls(name: str, text: str, expected: list[Item]) -> None:
    assert taken_apart(WITHOUT_CHANNELS[name], text) == expected


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        ("5", {"type": ["string", "number"]}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"5"'),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
        ("None", {"type": ["string", "null"]}, "null"),
        ("None", {"type": "string"}, '"None"'),
        ("b", {"$ref": "#/$defs/letter"}, '"b"'),
        ("2", {"$ref": "#/$defs/letter"}, "2"),
        ("[1, {}]", {"type": "array"}, "[1, {}]"),
        ("[1,", {"type": "array"}, '"[1,"'),
        ('"x"', {}, '"\\"x\\""'),
        ("1e999", {}, '"1e999"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        (r'["\ud800"]', {}, r'"[\"\\ud800\"]"'),
        ("x", {"$ref": "#/$defs/loop"}, '"x"'),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, '"5"'),
        ("9", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]}, "9"),
        ("[1]", {"type": ["string", "array"], "items": {"type": "string"}}, '"[1]"'),
        ('["1"]', {"type": ["string", "array"], "items": {"type": "string"}}, '["1"]'),
        ("True", {"type": ["boolean", "string"]}, "true"),
        ("2", {"allOf": [{"$ref": "#/$defs/letter"}, {"type": "string"}]}, '"2"'),
        pytest.param("1" * 400, {"type": ["integer", "string"]}, "1" * 400, id="an integer above all floats"),
        ("1" * 40, {"type": ["number", "string"], "multipleOf": 0.01}, "1" * 40),
        ("1e300", {"type": ["number", "string"], "multipleOf": 0.01}, "1e+300"),
        ("0.07", {"type": ["number", "string"], "multipleOf": 0.01}, "0.07"),
        ("1e300", {"type": ["number", "string"], "maximum": 10**400}, "1e+300"),
        pytest.param("[" * 700 + "]" * 700, {"enum": ["x", [1]]}, f'"{"[" * 700}{"]" * 700}"', id="deep lists"),
    ],
)
def test_a_text_becomes_what_its_schema_says(text: str, schema: dict[str, Any], expected: str) -> None:
    definitions = {"letter": {"enum": ["a", "b", 2]}, "loop": {"$ref": "#/$defs/loop"}}
    function = Function("f", None, {"properties": {"x": schema}, "$defs": definitions})
    assert as_json(text, reader_of(function.shapes, "x")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("['a', {'k': None}]", '["a", {"k": null}]'),
        ("{'b': True, 'c': (1, 2.5)}", '{"b": true, "c": [1, 2.5]}'),
        ('["a"]', '["a"]'),
        ("None", "null"),
        ("['a'", "\"['a'\""),
        ("(1, 2)", '"(1, 2)"'),
        ("{1: 2}", '"{1: 2}"'),
    ],
)
def test_lists_may_be_as_python_prints_them(text: str, expected: str) -> None:
    assert as_json(text, None, python=True) == expected


def test_arguments_come_as_they_are_made() -> None:
    """In Python syntax and Gemma's, a call is returned once it is complete."""
    for name, form in WITHOUT_CHANNELS.items():
        whole = form.written([WEATHER])
        scanner = form.scanner(start=0, only_calls=False, functions=FUNCTIONS)
        place = whole.index("Par")
        scanner.push(whole[:place])
        came = scanner.push("Par")
        assert came == ([] if name in AT_ONCE else [CallPart(0, arguments="Par")])


def test_little_is_held_of_what_follows_the_arguments_of_a_call() -> None:
    """Held text is read again for each piece of an answer."""
    scanner = WITHOUT_CHANNELS["hermes"].scanner(start=0, only_calls=False, functions=FUNCTIONS)
    parts = scanner.push('<tool_call>\n{"name": "now", "arguments": {}')
    for _ in range(MAX_REST_CHARS // 4 + 2):
        parts += scanner.push(",,,,")
        assert len(scanner._held) <= MAX_REST_CHARS
    assert [part for part in parts if isinstance(part, CallPart)] == [CallPart(0, "now", "{}")]


# ---------------------------------------------------------------- however it is divided

said = st.text('a{}[]()<|>:;",= \né🙂', max_size=12)
values = st.recursive(
    st.text("a\"\\'{}[]()<>|é🙂\n", max_size=5) | st.integers(-9, 9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"{', max_size=3), inner, max_size=3),
    max_leaves=6,
)
called = st.tuples(
    st.sampled_from(NAMES),
    st.dictionaries(st.text("kl_", min_size=1, max_size=2), values, max_size=3).map(
        lambda arguments: json.dumps(arguments, ensure_ascii=False)
    ),
)


def is_ambiguous(call: tuple[str, str]) -> bool:
    """Whether one of the strings would be read as JSON between tags, for a function without a schema."""
    return any(isinstance(one, str) and as_json(one, None) != json.dumps(one, ensure_ascii=False)
               for one in json.loads(call[1]).values())  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(sorted(WITHOUT_CHANNELS)),
    rows=st.lists(st.tuples(said, st.lists(called, min_size=1, max_size=3)), max_size=3),
    last=said,
    data=st.data(),
)
def test_how_an_answer_is_divided_changes_nothing(
    name: str, rows: list[tuple[str, list[tuple[str, str]]]], last: str, data: st.DataObject
) -> None:
    form = WITHOUT_CHANNELS[name]
    assume(name not in UNTYPED or not any(map(is_ambiguous, [call for _, calls in rows for call in calls])))
    text = "\n".join([f"{before}\n{form.written(calls)}" for before, calls in rows] + [last])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    for cut in (False, True):
        parts = parts_of(form, pieces, cut=cut)
        assert parts == parts_of(form, [text], cut=cut) == parts_of(form, list(text), cut=cut)
    items = [(part.name, json.loads(part.arguments)) for part in parts_of(form, pieces) if isinstance(part, CallPart)]
    assert items == [(called, json.loads(given)) for _, calls in rows for called, given in calls]
    texts = "".join([part.text for part in parts_of(form, pieces) if isinstance(part, TextPart)])
    expected = "".join([before for before, _ in rows]) + last
    assert texts.split() == expected.split() or "".join(texts.split()) == "".join(expected.split())


@settings(max_examples=examples(150), deadline=None)
@given(name=st.sampled_from([*WITHOUT_CHANNELS, "harmony"]), text=st.data())
def test_no_text_is_lost_or_told_twice(name: str, text: st.DataObject) -> None:
    """Text without a complete call is returned unchanged, whatever delimiters are in it."""
    form = WITHOUT_CHANNELS.get(name) or HarmonyFormat()
    pieces = text.draw(st.lists(st.sampled_from([*form.marks, "now", "{", "(", '"', " ", "x", "["]), max_size=8))
    parts = parts_of(form, pieces)
    assert parts == parts_of(form, ["".join(pieces)]) == parts_of(form, list("".join(pieces)))
    if name != "harmony" and not any(isinstance(part, CallPart) for part in parts):
        assert "".join([part.text for part in parts if isinstance(part, TextPart)]) == "".join(pieces)


@contextmanager
def bounded(max_calls: int = 20_000) -> Iterator[None]:
    """Fail after this number of function calls, as in an endless loop."""
    left = max_calls

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        assert left > 0, "too many function calls"

    earlier = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(earlier)


def read_damaged(form: CallFormat, text: str) -> None:
    for cut in (False, True):
        with bounded():
            parts = parts_of(form, [text], cut=cut)
        "".join([part.arguments if isinstance(part, CallPart) else part.text for part in parts]).encode()


DAMAGE = (*"{}[](),:\"'\\=<>-*\n²", "\\²", r'"\ud83d"', "1" * 400, "1e999", "NaN")


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize("inner", ["[}", "[1, }", "[[}]", "{a:[}"])
def test_a_list_that_a_brace_ends_is_text(name: str, inner: str) -> None:
    form = WITHOUT_CHANNELS[name]
    text = f"{form.openings[0]}call:now{{l:{inner}}}"
    read_damaged(form, text)
    assert taken_apart(form, text) == [text]


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from([*WITHOUT_CHANNELS, "harmony"]),
    calls=st.lists(called, min_size=1, max_size=2),
    damage=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(DAMAGE), st.integers(0, 3)), max_size=3),
    data=st.data(),
)
def test_damaged_calls_are_read_to_their_end(
    name: str, calls: list[tuple[str, str]], damage: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    form = WITHOUT_CHANNELS.get(name) or HarmonyFormat()
    text = form.written(calls)
    for place, piece, num_lost in damage:
        text = text[:place] + piece + text[place + num_lost :]
    read_damaged(form, text[: data.draw(st.integers(0, len(text)))])
