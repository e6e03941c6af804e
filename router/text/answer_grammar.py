"""Grammars for constrained answers, which workers enforce token by token.

A grammar is text for llguidance: rules in Lark syntax, of which `start` describes the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from common.grammar import gbnf_to_lark, is_gbnf
from common.wire import MAX_GRAMMAR_CHARS
from router.text.schema import (
    Document,
    canonical,
    enforceable,
    has_controls,
    portable,
    with_exact_sets,
    without_open_objects,
)

WHITESPACE = r"\n[ \t]{0,32}| "
"""White space allowed between JSON tokens. If more is allowed, small models fill their answers with it."""
ESCAPES = 'nrbtf\\"'
"""Escapes allowed in JSON strings. Without `u`, so that a model cannot spell the same member name in two ways."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
LARK_PRIORITY = re.compile(r"^([ \t]*[?!]{0,2}[_a-zA-Z][\w-]*)\.-?[0-9]{1,9}(?=[ \t]*[:\[])", re.MULTILINE)
"""Priority of a Lark rule. It only selects among parses and does not change the language."""
LARK_MARKS = re.compile(r"^([ \t]*)\?!(?=[_a-z])", re.MULTILINE)
"""Modifiers of a rule in an order that llguidance does not accept."""
POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: |(?=invalid regex))")
"""Position of an error in the generated grammar, which is meaningless to the client."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Return a grammar of JSON text that matches a schema."""
    return rule("start", json_expression(schema))


def json_expression(schema: Mapping[str, Any] | bool) -> str:
    """Return the right side of a rule for JSON that matches a schema with closed objects. Raises Unenforceable."""
    if not isinstance(schema, Mapping):
        return f"%json {json.dumps(schema)}"
    document = enforceable(canonical(schema))
    return document_expression(without_open_objects(document) if has_controls(document) else document)


def document_expression(document: Document, *, lenient: bool = False) -> str:
    """Return the right side of a rule for JSON that matches an `enforceable` document.

    With `lenient`, llguidance ignores keywords that it cannot enforce.
    """
    options = {
        "whitespace_pattern": WHITESPACE,
        "json_allowed_escapes": ESCAPES + ("u" if has_controls(document) else ""),
        **({"lenient": True} if lenient else {}),
    }
    whole = with_exact_sets(document).whole()
    known = {**whole, "x-guidance": options} if isinstance(whole, Mapping) else whole
    return f"%json {json.dumps(known, ensure_ascii=False, separators=(',', ':'))}"


def regex_grammar(pattern: str) -> str:
    r"""Return a grammar of the full matches of a Python regular expression, with ASCII `\d`, `\w` and `\s`.

    Raises ValueError for possessive quantifiers.
    """
    return str(llguidance.LLMatcher.grammar_from_regex(portable(pattern, python=True)))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return a grammar of one of several texts."""
    return rule("start", " | ".join(map(literal, choices)))


def free_grammar(text: str) -> str:
    """Convert a client's grammar in Lark syntax or GBNF. Raises GbnfError, a ValueError, for invalid GBNF."""
    if is_gbnf(text):
        return gbnf_to_lark(text)
    return LARK_MARKS.sub(r"\1!?", LARK_PRIORITY.sub(r"\1", text))


def rule(name: str, expression: str) -> str:
    return f"{name}: {expression}\n"


def literal(text: str) -> str:
    """Return the right side of a rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def special_token(token_id: int) -> str:
    """Return the right side of a rule for a special token, which is never part of text."""
    return f"<[{token_id}]>"


def is_special(expression: str) -> bool:
    """Whether the right side of a rule begins with a special token."""
    return expression.startswith("<[")


def bounded(grammar: str) -> str:
    """Return the grammar unchanged. Raises ValueError if it is too long for a message to a worker."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(grammar):,} characters; the maximum is {MAX_GRAMMAR_CHARS:,}")
    return grammar


def without_position(problem: str) -> str:
    """Remove the position in the generated grammar from a compile error."""
    return POSITION.sub("", problem)
