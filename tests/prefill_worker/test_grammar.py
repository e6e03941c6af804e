"""The first token of an answer that must match a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine_rig import prompt

AB = 'start: "ab" /[c-f]{3}/'


def test_the_first_token_begins_the_answer(make_engine: Callable[..., Any]) -> None:
    rig = make_engine(grammars=True)
    rig.ask(tokens := prompt(50), grammar=AB)
    rig.ask(prompt(20, 1), "free")
    rig.until(lambda: rig.is_clean)
    assert rig.deltas()[0].token_ids == (ord("a"),) == tuple(rig.oracle(tokens, grammar=AB))
    assert list(rig.deltas("free")[0].token_ids) == rig.oracle(prompt(20, 1))


def test_what_moved_here_goes_on_where_it_was(make_engine: Callable[..., Any]) -> None:
    """The last tokens of its prompt are output of another worker."""
    rig = make_engine(grammars=True)
    for number, (output, expected) in enumerate({"a": "b", "ab": "cdef", "abc": "cdef"}.items()):
        rig.ask([*prompt(40), *output.encode()], f"r{number}", num_output=len(output), max_tokens=8, grammar=AB)
        rig.until(lambda: rig.is_clean)
        (token_id,) = rig.deltas(f"r{number}")[0].token_ids
        assert chr(token_id) in expected


def test_a_grammar_at_fault_fails_its_request_alone(make_engine: Callable[..., Any]) -> None:
    rig = make_engine(grammars=True)
    rig.ask(prompt(30), "bad", grammar="start: nothing")
    rig.ask([*prompt(30), ord("z")], "strayed", num_output=1, max_tokens=8, grammar=AB)
    rig.ask(prompt(30, 2), "good", grammar=AB)
    rig.until(lambda: rig.is_clean)
    for name, why in (("bad", "unknown name"), ("strayed", "doesn't satisfy the grammar")):
        (failed,) = rig.failures(name)
        assert failed.phase == "grammar" and not failed.retryable and why in failed.message
    assert rig.deltas("good")[0].token_ids == (ord("a"),)


def test_a_worker_without_grammars_refuses_them(make_engine: Callable[..., Any]) -> None:
    rig = make_engine()
    rig.ask(prompt(30), grammar=AB)
    rig.until(lambda: rig.is_clean)
    (failed,) = rig.failures()
    assert failed.phase == "queue" and "knows no grammars" in failed.message
