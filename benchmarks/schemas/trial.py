"""One schema on trial: whether it is served, and whether every answer of its grammar matches it."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.schemas.corpus import Sample
from benchmarks.schemas.documents import Documents
from benchmarks.schemas.validity import Validity
from common.errors import RequestError
from common.grammar.checks import GrammarChecks
from common.grammar.vocabulary import compile_grammar
from router.text.answer.grammar import WHITESPACE, bounded, json_grammar, rule, without_place

PLACE = re.compile(r"^#\S*: |(?<=failed to compile JSON schema: )#\S*: ")
DETAIL = re.compile(r"""["'/`][^"'`]*["'/`]|\d+""")
REASON_CHARS = 90


@dataclass(slots=True)
class Trial:
    """What came of a schema. `refusal` and `plain_refusal` are the reasons of ours and of llguidance alone, or ""."""

    split: str
    name: str
    refusal: str = ""
    plain_refusal: str = ""
    compile_s: float = 0.0
    num_documents: int = 0
    num_unfinished: int = 0
    num_unjudged: int = 0
    wrong: tuple[str, ...] = ()
    """Answers of the grammar that do not match the schema, and invalid ones of the corpus that it accepts."""
    num_valid: int = 0
    num_valid_refused: int = 0
    num_invalid: int = 0
    stuck: str = ""
    """Why a walk through the grammar came to a place where nothing could follow, or ""."""


def tried(sample: Sample, documents: Documents, checks: GrammarChecks, num_documents: int, seed: str) -> Trial:
    """Compiles a schema, draws documents, and judges them. Raises RequestError where this machine is too busy."""
    trial = Trial(sample.split, sample.name)
    trial.plain_refusal = _problem(plain_grammar(sample.schema), checks)
    try:
        began = time.process_time()
        grammar = json_grammar(sample.schema)
        trial.compile_s = time.process_time() - began
    except (ValueError, RecursionError) as error:
        trial.refusal = _reason(str(error))
        return trial
    trial.refusal = _problem(grammar, checks)
    if trial.refusal:
        return trial
    began = time.process_time()
    matcher, problem = compile_grammar(documents.vocabulary, grammar)
    trial.compile_s += time.process_time() - began
    trial.refusal = _reason(problem)
    if problem:
        return trial
    wrong = []
    try:
        validity = Validity(sample.schema)
    except ValueError:
        validity = None
    rng = random.Random(seed + sample.name)
    for _ in range(num_documents):
        try:
            text = documents.draw(matcher, rng)
        except ValueError as error:
            trial.stuck = str(error)
            break
        if text is None:
            trial.num_unfinished += 1
            continue
        trial.num_documents += 1
        try:
            if validity is not None and (why := validity.problem(text)):
                wrong.append(f"{why}: {text.decode()}")
            trial.num_unjudged += validity is None
        except LookupError:
            trial.num_unjudged += 1
    for known in sample.valid:
        trial.num_valid += 1
        trial.num_valid_refused += not documents.accepts(matcher, _text(known))
    for known in sample.invalid:
        trial.num_invalid += 1
        if documents.accepts(matcher, _text(known)):
            wrong.append(f"an invalid document is accepted: {_text(known).decode()}")
    trial.wrong = tuple(wrong)
    return trial


def plain_grammar(schema: object) -> str:
    """The schema as a user of llguidance would send it, with our bound of white space."""
    known = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, Mapping) else schema
    return rule("start", f"%json {json.dumps(known, ensure_ascii=False)}")


def _problem(grammar: str, checks: GrammarChecks) -> str:
    """Why workers would not take a grammar, or ""."""
    try:
        return _reason(without_place(checks.submit(bounded(grammar)).result().problem))
    except RequestError:
        raise
    except ValueError as error:
        return _reason(str(error))


def _reason(message: str) -> str:
    """A message without the places and names of one schema, so that equal reasons are counted together."""
    brief = PLACE.sub("", message)
    kept = re.sub(r"`[^`]*`", lambda found: found[0].replace("`", "\0"), brief)
    return DETAIL.sub("…", kept).replace("\0", "`")[:REASON_CHARS]


def _text(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()
