"""What `diptych run` prints, with a service that only pretends to answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.model_files import DEFAULT_MODEL
from router.cli import run
from router.cli.client_flags import run_parser


def chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"choices": [{"delta": {"content": "Hello."}}]}


def test_an_answer_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"delta": {"reasoning_content": "a\x1b[2Jb"}}]}
        yield {"choices": [{"delta": {"content": "c\td\x9b2J\r\n\x07e\x7f\u00e9"}}]}

    service: Any = SimpleNamespace(answer=answer)
    chat = run.Chat(service, {})
    chat.say("hi", thoughts=True)
    assert capsys.readouterr().out == f"{run.DIM}a[2Jb{run.PLAIN}\nc\td2J\ne\u00e9\n"


@pytest.mark.parametrize(("model", "hints"), [(DEFAULT_MODEL, 1), ("Qwen3-0.6B", 0)])
def test_after_the_first_answer_of_the_default_model_a_better_one_is_named(
    model: str, hints: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service: Any = SimpleNamespace(model=model, answer=chunks)
    typed = iter(("one", "two"))
    monkeypatch.setattr(run, "_read_message", lambda: next(typed, "/bye"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run._chat(service, run_parser().parse_args([]), "")
    shown = capsys.readouterr()
    assert shown.out.count("Hello.") == 2
    assert shown.err.count("For better answers: diptych run ") == hints
