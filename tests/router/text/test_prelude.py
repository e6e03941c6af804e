"""Forms that follow a thought, as grammars over the tiny model's bytes."""

from __future__ import annotations

import contextlib
import json

import pytest

from router.text.answer_grammar import choice_grammar, free_grammar, json_grammar, literal, regex_grammar
from router.text.calls.harmony import HarmonyFormat
from router.text.grammar_writer import ChoiceDemand, RegexDemand, RulesDemand, grammar_of, text_of
from router.text.prelude import Prelude, thought_prelude
from router.text.thinking import ThoughtPosition
from router.text.thought_marks import KNOWN, ThoughtMarks

from ..answers import is_answer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS = {
    "json": (json_grammar(SCHEMA), '{"a": 1}', '{"a": "1"}'),
    "regex": (regex_grammar("[a-z<>/]+"), "<thin>", "A"),
    "choice": (choice_grammar(["yes", " no"]), " no", "no"),
    "lark": (free_grammar('start: "a" "b"\n%ignore / +/\n'), "a b", "ba"),
    "gbnf": (free_grammar('root ::= "a" [0-9]+'), "a12", "a"),
    "lark of one line": (free_grammar('start: /[0-9]+/ unit\nunit: "cm"'), "5cm", "5"),
    "grammars": (json.dumps({"grammars": [{"name": "x", "lark_grammar": 'start: "a"'}]}), "a", "b"),
    "grammars without a name": (
        json.dumps({"grammars": [{"name": None, "lark_grammar": "start: @form0"},
                                 {"name": "form0", "lark_grammar": 'start: "a"'}]}), "a", "b",
    ),
}  # fmt: skip
OPENED, BEFORE = ThoughtPosition.OPENED, ThoughtPosition.BEFORE


def before(form: str, marks: ThoughtMarks, position: ThoughtPosition, *, takes_breaks: bool = False) -> str:
    prelude = thought_prelude(marks, position, lambda text: (literal(text),), takes_breaks=takes_breaks)
    assert prelude is not None
    return prelude.before(form, is_regex=form == FORMS["regex"][0])


@pytest.mark.parametrize("name", FORMS)
def test_a_form_follows_the_thought(name: str) -> None:
    form, good, bad = FORMS[name]
    marks = KNOWN[0]
    opened, open_by_model = (before(form, marks, position) for position in (OPENED, BEFORE))
    for thought in ("", "Hm.\n</thin", '{"a": 1}', "é</think"):
        assert is_answer(opened, f"{thought}</think>{good}") and not is_answer(opened, f"{thought}</think>{bad}")
        assert is_answer(open_by_model, f"<think>{thought}</think>{good}")
    assert not is_answer(opened, good) and is_answer(open_by_model, good) and not is_answer(open_by_model, bad)
    assert not is_answer(opened, f"</think>\n{good}")
    for unclosed in ("<think>a", "<think>a</think>", f"<think>a</think>{bad}"):
        assert not is_answer(open_by_model, unclosed)


@pytest.mark.parametrize("marks", KNOWN[1:], ids=lambda marks: marks.start)
def test_all_known_marks(marks: ThoughtMarks) -> None:
    form, good, bad = FORMS["json"]
    grammar = before(form, marks, BEFORE, takes_breaks=True)
    for breaks in ("", "\n", "\n\n"):
        assert is_answer(grammar, f"{marks.start}Hm {marks.end[:-1]}{marks.end}{breaks}{good}")
        wrapped = f"{marks.start}Hm{marks.end}{breaks}{marks.head}{breaks}{good}"
        assert not marks.head or is_answer(grammar, wrapped)
    assert not is_answer(grammar, f"{marks.start}Hm{marks.end}\n\n\n{good}")
    if marks.head:
        assert is_answer(grammar, f"{marks.head}{good}") is marks.head_alone
        closed = before(form, marks, ThoughtPosition.CLOSED, takes_breaks=True)
        assert is_answer(closed, f"{marks.head}\n{good}") and is_answer(closed, good)
        assert not is_answer(closed, f"{marks.head}{bad}")
        choice, chosen, _ = FORMS["choice"]  # another form may begin like the head
        assert not is_answer(before(choice, marks, BEFORE), f"{marks.start}Hm{marks.end}{marks.head}{chosen}")
    assert not is_answer(grammar, f"{marks.start}Hm{marks.end}{bad}") and is_answer(grammar, good)


def test_thoughts_come_before_the_final_one() -> None:
    form, good, bad = FORMS["json"]
    grammar = Prelude(HarmonyFormat().prelude(literal)).before(form)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for head in ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"):
        assert is_answer(grammar, f"{head}{good}") and is_answer(grammar, f"{thought}{thought}{head}{good}")
        assert not is_answer(grammar, f"{thought}{head}{bad}")
    assert not is_answer(grammar, good) and not is_answer(grammar, thought)
    assert not is_answer(grammar, f"{thought.replace('analysis', 'commentary')}{head}{good}"), "clients see it as text"


def test_a_regular_expression_does_not_begin_as_a_thought() -> None:
    prelude = thought_prelude(KNOWN[0], BEFORE, lambda text: (literal(text),), takes_breaks=False)
    grammar = grammar_of(text_of(RegexDemand("(.|\n)*"), prelude))
    assert is_answer(grammar, "\x1c<thin") and is_answer(grammar, "<think>a</think>b")
    assert not is_answer(grammar, "<think>a") and not is_answer(grammar, "\x1c\n<think>a")


def test_a_choice_does_not_begin_as_a_thought() -> None:
    prelude = thought_prelude(KNOWN[0], BEFORE, lambda text: (literal(text),), takes_breaks=False)
    grammar = grammar_of(text_of(ChoiceDemand(("\n<think>a", "b")), prelude))
    assert is_answer(grammar, "b") and is_answer(grammar, "<think></think>b") and not is_answer(grammar, "\n<think>a")
    with pytest.raises(ValueError, match="every choice begins with '<think>'"):
        grammar_of(text_of(ChoiceDemand(("<think>a",)), prelude))


@pytest.mark.parametrize("grammars", ["5", "[1]", '{"a": 1}', '[{"lark_grammar": 5}]', '[{"name": []}]'])
def test_an_invalid_list_of_grammars_is_the_clients_error(grammars: str) -> None:
    prelude = thought_prelude(KNOWN[0], BEFORE, lambda text: (literal(text),), takes_breaks=False)
    with contextlib.suppress(ValueError):  # otherwise the library refuses it
        grammar_of(text_of(RulesDemand(f'{{"grammars": {grammars}}}'), prelude))
