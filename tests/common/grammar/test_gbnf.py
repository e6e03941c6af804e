"""GBNF as the library reads what it is converted to, beside a matcher of GBNF's own rules."""

from __future__ import annotations

import functools
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from common.grammar.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from common.grammar.vocabulary import compile_grammar
from common.model_files.resolve import resolve_model

from ...examples import examples
from ...random_documents import Documents

NAMES = ("root", "start", "Item", "item", "r-1", "T0")
TEXTS = ["".join(each) for length in range(6) for each in itertools.product("ab", repeat=length)]
OTHERS = ["\n", "a\n", "\u00e9", "a\u00e9b", "\U0001f600", "aaaaaaab", "abababab", "bbbbbbbb"]
Part = tuple[Any, ...]
Rules = dict[str, Part]


@functools.cache
def documents() -> Documents:
    return Documents(resolve_model("tiny-random"))


def compiled(text: str) -> llguidance.LLMatcher:
    matcher, problem = compile_grammar(documents().vocabulary, gbnf_to_lark(text))
    assert not problem, (problem, text)
    return matcher


def takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    return documents().accepts(matcher, text.encode())


# ------------------------------------------------------------ GBNF's rules, as llama.cpp's guide has them


@dataclass
class Reference:
    """Finds where each rule can end in a text, by widening what is known until nothing changes."""

    rules: Rules
    text: str
    known: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def matches(self) -> bool:
        size = -1
        while size != sum(map(len, self.known.values())) + len(self.known):
            size = sum(map(len, self.known.values())) + len(self.known)
            self.rule("root", 0)
            for name, begin in [*self.known]:
                self.known[name, begin] |= self.ends(self.rules[name], begin)
        return len(self.text) in self.known["root", 0]

    def rule(self, name: str, begin: int) -> set[int]:
        return self.known.setdefault((name, begin), set())

    def ends(self, part: Part, begin: int) -> set[int]:
        match part:
            case ("literal", text):
                return {begin + len(text)} if self.text.startswith(text, begin) else set()
            case ("set", inside, is_negated):
                has_one = begin < len(self.text) and (self.text[begin] in inside) is not is_negated
                return {begin + 1} if has_one else set()
            case ("any",):
                return {begin + 1} if begin < len(self.text) else set()
            case ("rule", name):
                return set(self.rule(name, begin))
            case ("choice", parts):
                return set().union(*(self.ends(each, begin) for each in parts))
            case ("sequence", parts):
                places = {begin}
                for each in parts:
                    places = set().union(*(self.ends(each, place) for place in places))
                return places
            case ("times", each, least, most):
                return self.repeated(each, least, most, begin)
        raise TypeError(part)

    def repeated(self, part: Part, least: int, most: int | None, begin: int) -> set[int]:
        places, found = {begin}, set() if least else {begin}
        for count in range(1, (len(self.text) + least + 1 if most is None else most) + 1):
            places = set().union(*(self.ends(part, place) for place in places))
            if count >= least:
                if places <= found:  # nothing new can come
                    break
                found |= places
        return found


def written(part: Part) -> str:
    match part:
        case ("literal", text):
            return '"' + "".join(ESCAPED.get(character, character) for character in text) + '"'
        case ("set", inside, is_negated):
            return f"[{'^' if is_negated else ''}{''.join(ESCAPED.get(each, each) for each in inside)}]"
        case ("any",):
            return "."
        case ("rule", name):
            return str(name)
        case ("choice", parts):
            return "(" + "|\n".join(map(written, parts)) + ")"
        case ("sequence", parts):
            return "( " + ' # ( [ "\n'.join(map(written, parts)) + ")"
        case ("times", each, least, most):
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?", (least, least): f"{{{least}}}"}.get((least, most))
            return written(each) + (sign or f"{{ {least} , {'' if most is None else most}}}")
    raise TypeError(part)


ESCAPED = {"\n": "\\n", '"': '\\"', "a": "\\x61", "\u00e9": "\\u00e9", "\U0001f600": "\\U0001F600"}


def grammar(rules: Rules) -> str:
    return "\n".join(f"{name} ::= {written(part)}" for name, part in rules.items()) + "\n"


def is_productive(rules: Rules) -> bool:
    """Whether every rule has a text."""
    known: set[str] = set()

    def has_text(part: Part) -> bool:
        match part:
            case ("rule", name):
                return name in known
            case ("choice", parts):
                return any(map(has_text, parts))
            case ("sequence", parts):
                return all(map(has_text, parts))
            case ("times", each, least, _):
                return not least or has_text(each)
        return True

    for _ in rules:
        known |= {name for name, part in rules.items() if has_text(part)}
    return len(known) == len(rules)


LITERALS = st.sampled_from(["a", "b", "ab", "ba", "aab", "", "\u00e9", "\n", "\U0001f600"]).map(
    lambda text: ("literal", text)
)
SETS = st.tuples(st.just("set"), st.sampled_from(["a", "b", "ab", "\u00e9\n"]), st.booleans())
COUNTS = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (2, None), (0, 0), (0, 2)])


def parts(names: list[str]) -> SearchStrategy[Part]:
    leaves = st.one_of(LITERALS, SETS, st.just(("any",)), st.sampled_from(names).map(lambda name: ("rule", name)))

    def extended(child: SearchStrategy[Part]) -> SearchStrategy[Part]:
        several = st.lists(child, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.just("choice"), several),
            st.tuples(st.just("sequence"), several),
            st.tuples(child, COUNTS).map(lambda pair: ("times", pair[0], *pair[1])),
        )

    return st.recursive(leaves, extended, max_leaves=6)


def some_rules(names: list[str]) -> SearchStrategy[Rules]:
    return st.fixed_dictionaries(dict.fromkeys(names, parts(names)))


RULES = st.integers(1, 4).flatmap(lambda count: some_rules(list(NAMES[:count])))
LIMITS = settings(deadline=None, max_examples=examples(100), suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@LIMITS
@given(RULES.filter(is_productive))
def test_the_same_texts(rules: Rules) -> None:
    matcher = compiled(grammar(rules))
    for text in (*TEXTS, *OTHERS):
        assert takes(matcher, text) is Reference(rules, text).matches(), (text, grammar(rules))


@pytest.mark.slow
@LIMITS
@given(RULES.filter(is_productive), st.integers(0, 99))
def test_every_answer_is_a_text_of_its_grammar(rules: Rules, seed: int) -> None:
    matcher, rng = compiled(grammar(rules)), random.Random(seed)
    for _ in range(3):
        found = documents().draw(matcher, rng)
        if found is not None and len(found) < 7:
            assert Reference(rules, found.decode()).matches(), (found, grammar(rules))


# ------------------------------------------------------------ examples


@pytest.mark.parametrize(
    ("text", "texts", "others"),
    [
        (r'root ::= "\u0041bcd"', ["Abcd"], ["\u418bcd"]),
        (r'root ::= "\x41\U0001F600\n\t\r\\\"\[\]"', ['A\U0001f600\n\t\r\\"[]'], []),
        ('root ::= "a\nb"', ["a\nb"], ["ab"]),
        (r"root ::= [\u0041-\u0043]", ["A", "C"], ["D", "u"]),
        (r"root ::= [\]\-a\\^]+", ["]-a\\^"], ["b"]),
        ("root ::= [a-] [^-a] [+--] [z-a!]", ["-b-!", "ab,!"], ["--+!", "ab.!", "ab,z"]),
        ("root ::= [&&a] [~~b] [[:c:]", ["&b:", "a~["], ["ac:"]),
        ("root ::= .", ["\n", "\u00e9", "\U0001f600", "\0"], ["", "ab"]),
        ('root ::= start "!"\nstart ::= "a" | "b"', ["a!", "b!"], ["a"]),
        ('root ::= Item item\nItem ::= "x"\nitem ::= "y"', ["xy"], ["xx", "yy"]),
        ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', ["xy"], []),
        ('root ::= x "b"\nx ::= "a" | "ab"', ["ab", "abb"], ["a"]),
        ('root ::= "if" "x" | e\ne ::= [a-z]+ "!" | "(" e ")"', ["ifx", "if!", "ifx!", "(if!)"], ["if", "(ifx)"]),
        (
            'root ::= "(" root ")" | "a" ("b" | y) u\ny ::= "b" "c"\nu ::= "c" root | "d"',
            ["abd", "abcabd", "abcd", "(abccabd)"],
            ["abc", "abcab"],
        ),
        ('root ::= item | "a"*\nitem ::= [ab] root', ["aab", "aabaa", ""], ["c"]),
        ('root ::= "a" |\n  "b" # c\n  | "c"\n\n\n# d ::= "\n', ["a", "b", "c"], ["d"]),
        ('root ::= (\n "a"\n # b\n "c" )*\r\n', ["", "acac"], ["a"]),
        ('root ::= | "a"', ["", "a"], []),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{ 1 , 2 } "e"{0}', ["aabd", "aabbbccdd"], ["abd", "aabcccd"]),
        ('root ::= "ab"* "c"+?', ["", "ababcc"], ["a", "aab"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
        ('root ::= ""', [""], ["a"]),
        ('x ::= y\nroot ::= x x\ny ::= "a" | "b" x', ["aa", "bbaba"], ["a", "bababa"]),
    ],
)
def test_texts(text: str, texts: list[str], others: list[str]) -> None:
    matcher = compiled(text)
    assert [each for each in texts if not takes(matcher, each)] == []
    assert [each for each in others if takes(matcher, each)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('x ::= "a"', "rule `root` is not defined"),
        ('root ::= "a"\nx ::= y', "rule `y` is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule `root` is defined twice"),
        ('root ::= "a', "line 1: unexpected character '\"'"),
        ("root ::=\n [a", "line 2: unexpected character '\\['"),
        ("root ::= [] [a]", "has no characters"),
        (r'root ::= "\q"', r"`\\q` is not a character"),
        (r'root ::= "\u00"', "is not a character"),
        (r'root ::= "\ud83d"', "is not a character"),
        (r'root ::= "\U00110000"', "is not a character"),
        ('root ::= ("a"', "`\\(` without"),
        ('root ::= "a")', "`\\)` without"),
        ("root ::= *", "follows no item to repeat"),
        ('root ::= "a"{2,1}', "maximum below its minimum"),
        ('root ::= "a"{x}', "unexpected"),
        ("root ::= root", "`root` never ends"),
        ('root ::= "a" x\nx ::= x "b" | y\ny ::= ("c" x)+', "`root` never ends"),
        ("root ::= <think>", "unexpected character '<'"),
        ('root ::= x y ::= "a"', "begins before"),
        ('root ::= |\nx ::= "a"', "begins before"),
        ('root ::= ("a"\nx ::= "b")', "begins before"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "deeper than 64"),
        ('root ::= "a"' + "*" * 20, "more than 8 repetitions"),
        ('root ::= "' + "a" * 40_000 + '" root?', "too large, or too ambiguous"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(GbnfError, match=problem):
        gbnf_to_lark(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('# a\n\n root\t::= "a"', True), ("// a\nroot ::= b", True), ("::= a", True), ('start: "::="', False),
        ("?start: a", False), ("", False), ("# root ::= a\nstart: b", False), ("a-1 ::= b", True),
    ],
)  # fmt: skip
def test_which_form_a_grammar_has(text: str, expected: bool) -> None:
    assert is_gbnf(text) is expected


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_terminals_are_long_where_they_can_be() -> None:
    """A terminal of one character would cost a step of the parser for each of a string."""
    lines = gbnf_to_lark(JSON).splitlines()
    assert any("bfnrt" in line and line.startswith("T") and line.count("x{22}") > 1 for line in lines)
    matcher = compiled(JSON)
    assert takes(matcher, '{"a\\n": [1.5e3, {"b": null}, "\u00e9"]}') and not takes(matcher, '{"a": tru}')


def test_counts_of_long_items_are_kept_by_rules() -> None:
    """A lexer would have a state for each character of each item."""
    assert "{9,99}" in gbnf_to_lark('root ::= item{9,99}\nitem ::= "a" [^"]{1,100} "b"').split("T", 1)[0]
    assert "{1,500}" not in gbnf_to_lark("root ::= [a-z]{1,500}").split("T", 1)[0]


GROWING = {
    "chain": lambda n: "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(n)) + f'r{n} ::= "b" | root\nroot ::= r0',
    "doubling": lambda n: "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(n)) + f'r{n} ::= ""\nroot ::= r0',
    "lines": lambda n: 'root ::= "a"' + "\n" * 10 * n,
    "comments": lambda n: "#\n" * 10 * n + 'root ::= "a"',
    "recursive choices": lambda n: 'root ::= "" | ' + " | ".join(f"[^{chr(200 + i)}] root" for i in range(n)),
    "nullable parts": lambda n: 'root ::= "" | root ' + '"a"? ' * n,
    "unclosed": lambda n: "root ::= " + "[" * 10 * n,
}  # fmt: skip


@pytest.mark.slow_except("doubling", "lines", "nullable parts")
@pytest.mark.parametrize("name", GROWING)
def test_the_time_is_linear(name: str) -> None:
    """Four times the text takes far less than sixteen times the time."""

    def took(size: int) -> float:
        text = GROWING[name](size)
        began = time.thread_time()
        try:
            gbnf_to_lark(text)
        except GbnfError:
            assert name == "unclosed"
        return time.thread_time() - began

    assert took(4000) < 0.5 + 11 * min(took(1000), took(1000))
