"""What `diptych run` prints, with a service that only pretends to answer."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.model_files import DEFAULT_MODEL
from router.cli import run
from router.cli.client_flags import run_parser
from router.cli.router_client import LoadSource


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


class Child:
    """A `diptych serve` that only pretends to start."""

    def __init__(self, *_: object, alive: bool = True, **__: object) -> None:
        self.alive, self.stopped = alive, False

    def launch(self, *_: object) -> None: ...

    def log_tail(self) -> str:
        return "address already in use\n"

    def stop(self, grace_s: float) -> None:
        self.stopped = True


@pytest.mark.parametrize(("served", "status"), [("OTHER", 1), ("tiny-random", 0)])
def test_a_service_that_appears_during_the_start_must_serve_the_model(
    served: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child, answers = Child(), iter((None, [{"id": served, "root": served}]))
    monkeypatch.setattr(run, "ChildProcess", lambda *_, **__: child)
    monkeypatch.setattr(run.Service, "models", lambda self: next(answers))
    monkeypatch.setattr(run.Service, "is_ready", lambda self: True)
    monkeypatch.setattr(run.Service, "answer", lambda self, body: chunks(body))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run.main(["tiny:random", "hi", "--url", "http://127.0.0.1:1"]) == status
    shown = capsys.readouterr()
    assert ("Hello." in shown.out) is (status == 0) and child.stopped
    assert status == 0 or "http://127.0.0.1:1 serves OTHER, not tiny-random: stop it" in shown.err


def test_a_service_that_answers_for_a_child_that_has_exited_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = Child(alive=False)
    monkeypatch.setattr(run, "ChildProcess", lambda *_, **__: child)
    monkeypatch.setattr(run.Service, "is_ready", lambda self: True)
    with pytest.raises(run.RunError, match="the service did not start:\naddress already in use"):
        run.start(run.Service(LoadSource("127.0.0.1", 1)), "tiny-random", (), tmp_path)
    assert child.stopped
