"""What an answer must match, written as one grammar: workers hold the answer to it token by token.

Grammars are text of the library llguidance, rules in Lark's form: `start` is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from common.wire.sampling_params import MAX_GRAMMAR_CHARS
from router.text.closed_schema import closed

WHITESPACE = r"\n[ \t]{0,32}| "
"""Between the parts of a JSON text, if anything: a small model that may do more fills its answer with blanks."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_PROBLEM_CHARS = 400
"""Of what the library's parser of GBNF says."""
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ASCII_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[ \t\n\r\f\v]"}
PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: |(?=invalid regex))")
"""Where in our rules a client's schema or expression is wrong, which tells the client nothing."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """JSON text of a schema."""
    return rule("start", json_expression(schema))


def json_expression(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
    """A rule's right side: JSON text of a schema, its objects `closed`.

    `lenient` leaves out what the library does not know of schemas.
    """
    options = {"whitespace_pattern": WHITESPACE, **({"lenient": True} if lenient else {})}
    known = {**closed(schema), "x-guidance": options} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(known, ensure_ascii=False)}"


def regex_grammar(pattern: str) -> str:
    r"""Text that a regular expression matches as a whole. `\d`, `\w` and `\s` are ASCII's."""
    ascii_only = ESCAPE.sub(lambda found: ASCII_CLASSES.get(found[1], found[0]), pattern)
    return str(llguidance.LLMatcher.grammar_from_regex(ascii_only))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts."""
    return rule("start", " | ".join(map(literal, choices)))


def free_grammar(text: str) -> str:
    """Rules of the client's own, in Lark's or GBNF's form. Raises ValueError for GBNF that cannot be read."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # of the library's own parser of GBNF, which raises what it comes upon
        raise ValueError(str(error)[:MAX_PROBLEM_CHARS]) from error


def rule(name: str, expression: str) -> str:
    return f"{name}: {expression}\n"


def literal(text: str) -> str:
    """Just this text, on a rule's right side."""
    return json.dumps(text, ensure_ascii=False)


def bounded(grammar: str) -> str:
    """The grammar. Raises ValueError for one that is longer than a message to a worker may hold."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar of {len(grammar):,} characters, at most {MAX_GRAMMAR_CHARS:,} are taken")
    return grammar


def told(problem: str) -> str:
    """What a client is told of a problem that compiling its grammar has."""
    return PLACE.sub("", problem)
