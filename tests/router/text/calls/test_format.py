"""Answers that each format's grammar accepts, with delimiters as text and as special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import pytest
import tokenizers

from common.grammar.vocabulary import _TokenizerAdapter, limits
from common.model_files.resolve import resolve_model
from common.model_files.tiny import EOS
from common.model_files.tokenizer import Tokenizer
from router.text.calls.format import CallFormat, Function, Wanted
from router.text.calls.harmony import HarmonyFormat
from router.text.calls.llama3 import Llama3Format
from router.text.calls.pythonic import PythonicFormat
from router.text.prelude import thought_prelude
from router.text.text_pipeline import TextPipeline
from router.text.thinking import ThoughtPosition
from router.text.thought_marks import ThoughtMarks

from .formats import FORMATS, TAGGED, UNTYPED, WITHOUT_CHANNELS

WEATHER = Function(
    "get_weather",
    "Weather of a city",
    {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "unit": {"$ref": "#/$defs/unit"},
        },
        "required": ["city"],
    },
)
BOTH = (Function("now"), WEATHER)
GOOD = [
    [("now", "{}")],
    [("get_weather", '{"city": "Paris"}')],
    [("get_weather", '{"city": "O\'Hare \\"\\n", "days": [1, 2], "unit": "F"}')],
]
BAD = [
    [("then", "{}")],
    [("now", '{"a": 1}')],
    [("get_weather", "{}")],
    [("get_weather", '{"city": 1}')],
    [("get_weather", '{"city": "Paris", "days": ["a"]}')],
    [("get_weather", '{"city": "Paris", "unit": "K"}')],
]


class Vocabulary:
    """The tiny model's bytes, and with `special` all delimiters as special tokens."""

    def __init__(self, *, special: bool) -> None:
        inner = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-random").tokenizer))
        marks = {mark for form in FORMATS.values() for mark in form.marks}
        if special:
            inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in sorted(marks)])
        self.text = TextPipeline(Tokenizer(inner), None, max_model_len=100, threads=1)
        self.spell = self.text.spell
        words: Any = _TokenizerAdapter(self.text.tokenizer, EOS, self.text.tokenizer.vocab_size)
        self.library = llguidance.LLTokenizer(words, n_vocab=self.text.tokenizer.vocab_size, eos_token=[EOS])
        self._matchers: dict[str, llguidance.LLMatcher] = {}

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the whole text is an answer."""
        if grammar not in self._matchers:
            self._matchers[grammar] = llguidance.LLMatcher(self.library, grammar, log_level=0, limits=limits())
        matcher = self._matchers[grammar].deep_copy()
        assert not matcher.is_error(), matcher.get_error()
        ids = self.text.tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def special_after(self, grammar: str, text: str) -> set[str]:
        """The special tokens that may follow the beginning of an answer."""
        matcher = llguidance.LLMatcher(self.library, grammar, log_level=0, limits=limits())
        ids = self.text.tokenizer.encode(text, add_special_tokens=False)
        assert matcher.consume_tokens(ids)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        special = sorted(self.text.tokenizer.special_ids)
        return {self.text.tokenizer.id_to_token(token_id) for token_id in special if mask >> token_id & 1}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    found = Vocabulary(special=request.param)
    yield found
    found.text.close()


@pytest.fixture(params=WITHOUT_CHANNELS)
def form(request: pytest.FixtureRequest) -> CallFormat:
    return FORMATS[request.param]


Check = Callable[[str], bool]


def check_of(vocabulary: Vocabulary, form: CallFormat, **wanted: Any) -> Check:
    grammar = form.grammar(Wanted(BOTH, **wanted), vocabulary.spell)
    return lambda text: vocabulary.accepts(grammar, text)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(
    "wanted",
    [{"required": True}, {"required": True, "several": False}, {}, {"several": False}, {"answer": {"type": "object"}}],
    ids=str,
)
def test_calls_match_their_functions(vocabulary: Vocabulary, form: CallFormat, wanted: dict[str, Any]) -> None:
    accepts = check_of(vocabulary, form, **wanted)
    for calls in GOOD:
        assert accepts(form.written(calls)), calls
    assert not accepts(form.written(GOOD[1])[:-1]), "a call without its end"
    unmarked, is_free = form.is_unmarked, not wanted.get("required") and "answer" not in wanted
    for calls in BAD[1:] if form.name != "llama3" or "answer" not in wanted else []:  # there it is such an answer
        is_text = form.name in UNTYPED and calls == [("get_weather", '{"city": 1}')]  # every text is one
        assert accepts(form.written(calls)) is is_text, calls
    like_an_answer = "answer" in wanted and form.name == "llama3"
    assert accepts(form.written(BAD[0])) is (unmarked and (is_free or like_an_answer))
    assert accepts(form.written(GOOD[0] + GOOD[1])) is wanted.get("several", True)
    for text in ("", "Hi!", '{"name": "Bob"}', '{"x": [{}]}', "a [b] <c>"):
        assert accepts(text) is (is_free or ("answer" in wanted and text[:1] == "{")), text
    assert accepts(f"I look.\n{form.written(GOOD[1])}") is is_free


def test_arguments_contain_no_special_tokens(vocabulary: Vocabulary, form: CallFormat) -> None:
    """Else an end token could cut a text short. The format's own marks may end it."""
    grammar, call = form.grammar(Wanted(BOTH, required=True), vocabulary.spell), form.written([GOOD[1][0]])
    assert vocabulary.special_after(grammar, call[: call.index("ris")]) <= {*form.marks}


@pytest.mark.quick_cover(1)
def test_with_auto_what_begins_as_a_call_becomes_one(vocabulary: Vocabulary, form: CallFormat) -> None:
    accepts = check_of(vocabulary, form)
    whole = form.written(GOOD[1])
    assert not any(accepts(f"Hm\n{whole[:end]}") for end in range(whole.index("Paris"), len(whole)))
    assert accepts(f"{whole} Done.") and accepts(f"a\n{whole}\nb\n{form.written(GOOD[0])} c")


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("wanted", [{}, {"several": False}, {"required": True}], ids=str)
def test_a_thought_may_come_first(vocabulary: Vocabulary, form: CallFormat, wanted: dict[str, Any]) -> None:
    """The marks of thoughts are two special tokens, which text never contains."""
    marks, is_free = ThoughtMarks("<|bos|>", "<|im_start|>"), "required" not in wanted
    grammar, call = form.grammar(Wanted(BOTH, **wanted), vocabulary.spell), form.written([("now", "{}")])

    def accepts(text: str, position: ThoughtPosition) -> bool:
        prelude = thought_prelude(marks, position, vocabulary.text.spell_all, takes_breaks=not is_free)
        return vocabulary.accepts(grammar if prelude is None else prelude.before(grammar), text)

    before, opened, after = ThoughtPosition.BEFORE, ThoughtPosition.OPENED, ThoughtPosition.AFTER
    thought = "hm<|im_start|>\n\n"
    for text, position in ((call, before), (f"<|bos|>{thought}{call}", before), (f"{thought}{call}", opened)):
        assert accepts(text, position), text
    for text in ("Hi", ""):
        assert accepts(text, before) is accepts(f"<|bos|>hm<|im_start|>{text}", before) is is_free
        assert accepts(text, after) is accepts(f"hm<|im_start|>{text}", opened) is is_free
    for text in ("<|bos|>hm", f"Hi<|bos|>{thought}{call}", f"{thought}{call}", f"<|bos|><|bos|>{thought}{call}"):
        assert not accepts(text, before), text
    for text in (call, "hm", f"<|bos|>{thought}{call}", f"{thought}Hi<|im_start|>"):
        assert not accepts(text, opened), text
    assert not accepts(f"<|bos|>{thought}{call}", after)


@pytest.mark.quick_cover(1)
def test_no_text_follows_the_only_call_of_an_answer(vocabulary: Vocabulary, form: CallFormat) -> None:
    accepts = check_of(vocabulary, form, several=False)
    assert not accepts(f"{form.written(GOOD[0])} Done.")


def test_llama_may_begin_with_its_tag() -> None:
    vocabulary = Vocabulary(special=True)
    tagged = f"<|python_tag|>{Llama3Format().written(GOOD[1])}"
    for wanted in ({}, {"required": True}, {"answer": {"type": "object"}}):
        assert check_of(vocabulary, Llama3Format(), **wanted)(tagged)
    vocabulary.text.close()


def test_python_types() -> None:
    """Arguments in Python syntax are checked by type."""
    vocabulary = Vocabulary(special=False)
    schema = {
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {"type": "number"}}},
            "c": {"anyOf": [{"const": 1}, {"const": "it's"}]},
            "d": {"$ref": "#/$defs/tree"},
            "e": {},
        },
        "required": ["b"],
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    form = PythonicFormat()
    grammar = form.grammar(Wanted([Function("f", None, schema)], required=True), vocabulary.spell)
    for good in ("b={}", "a=None, b={'x': True}", 'a=-3,b={"x": False, "y": 1.5e3}, c=1', 'b={"y": 2}, c="it\'s"',
                 "b={}, d=[[], [[]]]", "b={}, e={'k': [1, None, 'x']}, f"[:-3]):  # fmt: skip
        assert vocabulary.accepts(grammar, f"[f({good})]"), good
    for bad in ("", "a=1", "a='x', b={}", "b={}, a=1", "b={'z': 1}", "b={}, c=2", "b={}, d=[1]", "b={}, b={}", "b={},"):
        assert not vocabulary.accepts(grammar, f"[f({bad})]"), bad
    vocabulary.text.close()


def test_python_bounds() -> None:
    """Bounds of numbers, strings and lists also apply in Python syntax."""
    vocabulary = Vocabulary(special=False)
    members: dict[str, tuple[Any, list[str], list[str]]] = {
        "whole": ({"type": "integer", "minimum": 0, "maximum": 99}, ["0", "99"], ["100", "-1", "7363243109636336324"]),
        "either": ({"type": ["integer", "null"], "exclusiveMinimum": 2}, ["None", "3"], ["2", "None3"]),
        "number": ({"type": "number", "minimum": -1, "maximum": 1.5}, ["-1", "0.25", "1.5"], ["1.6", "-1.1"]),
        "short": ({"type": "string", "minLength": 1, "maxLength": 3}, ['"a"', '"a\\nb"'], ['""', '"abcd"']),
        "code": ({"type": "string", "pattern": "^[A-Z]{2}$"}, ['"DE"'], ['"de"', '"DEU"']),
        "day": ({"type": "string", "format": "date"}, ['"2026-11-24"'], ['"tomorrow"']),
        "odd": ({"type": "string", "pattern": "^(?=x)x"}, ['"y"'], []),  # cannot be enforced
        "pair": ({"type": "array", "minItems": 2, "maxItems": 2}, ["[1, 'a']"], ["[1]", "[1, 2, 3]", "[]"]),
        "few": ({"type": "array", "items": {"enum": ["x"]}, "maxItems": 2}, ["[]", "['x', 'x']"], ["['x', 'x', 'x']"]),
        "some": ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ["[1]", "[1, 2, 3]"], ["[]", "['a']"]),
        "none": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    }
    for name, (schema, good, bad) in members.items():
        parameters = {"properties": {name: schema}, "required": [name]}
        grammar = PythonicFormat().grammar(Wanted([Function("f", None, parameters)], required=True), vocabulary.spell)
        assert [text for text in good if not vocabulary.accepts(grammar, f"[f({name}={text})]")] == [], name
        assert [text for text in bad if vocabulary.accepts(grammar, f"[f({name}={text})]")] == [], name
    vocabulary.text.close()


@pytest.mark.parametrize("name", TAGGED)
def test_texts_between_tags(vocabulary: Vocabulary, name: str) -> None:
    """Types, enumerations, lengths, references and alternatives apply; members follow the schema's order."""
    form = FORMATS[name]
    schema = {
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
            "c": {"anyOf": [{"const": 1}, {"const": "it's"}]},
            "d": {"$ref": "#/$defs/tree"},
            "short": {"type": "string", "minLength": 1, "maxLength": 3},
            "free": {},
        },
        "required": ["b"],
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    grammar = form.grammar(Wanted([Function("f", None, schema)], required=True), vocabulary.spell)
    for good in ('{"b": {"x": true}}', '{"a": null, "b": {"x": false}}', '{"a": 5, "b": {"x": true}, "c": "it\'s"}',
                 '{"b": {"x": true}, "d": [[], [[]]]}', '{"b": {"x": true}, "short": "a<b"}',
                 '{"b": {"x": true}, "free": "<x>\\n[1"}', '{"b": {"x": true}, "free": {"k": [1]}}'):  # fmt: skip
        assert vocabulary.accepts(grammar, form.written([("f", good)])), good
    for bad in ("{}", '{"a": 1}', '{"a": "x", "b": {"x": true}}', '{"b": {}}', '{"b": {"x": 1}}',
                '{"b": {"x": true}, "a": 1}', '{"b": {"x": true}, "c": 2}', '{"b": {"x": true}, "d": [1]}',
                '{"b": {"x": true}, "short": ""}', '{"b": {"x": true}, "short": "abcd"}',
                '{"b": {"x": true}, "z": 1}', '{"b": {"x": true}, "b": {"x": true}}'):  # fmt: skip
        if bad.count('"b"') == 1:
            assert not vocabulary.accepts(grammar, form.written([("f", bad)])), bad


@pytest.mark.parametrize("name", TAGGED)
def test_a_function_without_a_schema_accepts_any_arguments(vocabulary: Vocabulary, name: str) -> None:
    form = FORMATS[name]
    grammar = form.grammar(Wanted([Function("f", None, {})], required=True), vocabulary.spell)
    for given in ("{}", '{"any_key": "x", "other": [1]}'):
        assert vocabulary.accepts(grammar, form.written([("f", given)]))


# ---------------------------------------------------------------- channels

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.slow_cases("text")
def test_channels(vocabulary: Vocabulary) -> None:
    form = HarmonyFormat()
    free, required = check_of(vocabulary, form), check_of(vocabulary, form, required=True)
    schema = check_of(vocabulary, form, answer={"type": "object"})
    for accepts in (free, required, schema):
        for calls in GOOD:
            for before in ("", THOUGHT, THOUGHT + THOUGHT):
                assert accepts(before + form.written(calls))
            remark = THOUGHT.replace("analysis", "commentary")
            assert accepts(remark + form.written(calls)) is (accepts is not schema)
        for calls in BAD:
            assert not accepts(form.written(calls))
        assert accepts(" to=functions.now<|channel|>commentary json<|message|>{}")
        assert accepts("<|channel|>commentary to=functions.now<|message|>{}")
        assert accepts("<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}")
        assert not accepts("<|channel|>commentary to=functions.nowjson<|message|>{}"), "this calls nowjson"
        assert not accepts(THOUGHT) and not accepts("Hi")
    answers = [(f"{before}{FINAL}{text}", text) for before in ("", THOUGHT) for text in ("", "Hi", '{"a": 1}')]
    for answer, text in answers:
        assert free(answer) and not required(answer)
        assert schema(answer) is (text == '{"a": 1}')


@pytest.mark.quick_cover(1)
def test_unknown_keywords_of_schemas_are_ignored(vocabulary: Vocabulary, form: CallFormat) -> None:
    odd = Function("odd", None, {"properties": {"a": {"not": {}}, "b-c": {"minLength": 1}}, "if": {}, "type": "string"})
    empty = Function("empty.one", None, {})
    grammar = form.grammar(Wanted([odd, empty]), vocabulary.spell)
    assert vocabulary.accepts(grammar, form.written([("empty.one", "{}")]))


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["object", "null"]}, {}, {"properties": {}}])
def test_arguments_are_an_object_whatever_their_schema_says(parameters: dict[str, Any]) -> None:
    """The scanner finds the end of arguments by their braces."""
    vocabulary, form = Vocabulary(special=False), FORMATS["hermes"]
    grammar = form.grammar(Wanted([Function("now", None, parameters)], required=True), vocabulary.spell)
    assert vocabulary.accepts(grammar, form.written([("now", "{}")]))
    assert not any(vocabulary.accepts(grammar, form.written([("now", other)])) for other in ('""', "null", "[]"))
    vocabulary.text.close()
