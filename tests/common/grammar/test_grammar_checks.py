"""Grammars that take too much are found out where that can be killed; all others are not kept waiting by them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import Unavailable
from common.grammar import checks as checks_module
from common.grammar import grammars
from common.grammar.checks import GrammarChecks, Verdict
from common.grammar.compiler import MAX_BYTES
from common.grammar.grammars import CompiledGrammar, Grammars
from common.model_files.resolve import resolve_model
from common.model_files.tiny import VOCAB_SIZE

from ...waiting import wait_until

TRIES = 3
WAIT_S = 60.0
TRIVIAL = 'start: "yes"'
ENDLESS = 'start: %json {"type": "integer", "multipleOf": 99999989}'
"""Takes minutes and gigabytes: the library's own bounds do not count what it does for a grammar's first byte."""
FORCED = "start: /(a{4000}){500}/"
"""Two million bytes of which none is a choice."""
REAL = {
    "many members": {f"member_{i}": {"type": "string"} for i in range(2000)},
    "groups": {
        f"group_{i}": {"type": "object", "properties": {f"member_{j}": {"type": "number"} for j in range(40)}}
        for i in range(40)
    },
    "enums": {f"of_{i}": {"enum": [f"value {j}" for j in range(500)]} for i in range(8)},
    "long texts": {f"text_{i}": {"type": "string", "maxLength": 20_000} for i in range(20)},
    "formats": {name: {"type": "string", "format": name} for name in ("date-time", "email", "uuid", "uri", "ipv6")},
    "patterns": {f"code_{i}": {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{i + 1}}}$"} for i in range(100)},
}


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """Slow grammars yield to no other tests: beside them they would not get their second of a processor in time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.grammar.checks.SLOW_NICENESS", 0)
        yield


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(resolve_model("tiny-random"), VOCAB_SIZE)
    yield made
    made.close()


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarChecks]]:
    """Checks with bounds of a test's own."""
    made: list[GrammarChecks] = []

    def one(**bounds: Any) -> GrammarChecks:
        made.append(GrammarChecks(resolve_model("tiny-random"), VOCAB_SIZE, **bounds))
        return made[-1]

    yield one
    for each in made:
        each.close()


def verdict(checks: GrammarChecks, grammar: str) -> Verdict:
    return checks.submit(grammar).result(WAIT_S)


def patient_verdict(checks: GrammarChecks, grammar: str) -> Verdict:
    """As a client gets it that asks again: a busy machine gives a compiler less than a second of a processor in 20."""
    for _ in range(TRIES - 1):
        try:
            return verdict(checks, grammar)
        except Unavailable:
            continue
    return verdict(checks, grammar)


def pid_of(checks: GrammarChecks) -> int:
    assert checks._compiler is not None
    return checks._compiler._process.pid


@pytest.mark.slow_cases("required-many members", "optional-many members")
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("required", [True, False], ids=["required", "optional"])
def test_schemas_of_programs_are_within_the_bounds(checks: GrammarChecks, name: str, required: bool) -> None:
    schema = {"type": "object", "properties": REAL[name], "required": [*REAL[name]] if required else []}
    found = verdict(checks, f"start: %json {json.dumps(schema)}")
    assert found.problem == "" and 0 < found.num_bytes < MAX_BYTES


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(ENDLESS, marks=pytest.mark.slow),
        pytest.param(FORCED, marks=pytest.mark.slow),
        "start: A\nA: ~/(.*[ab].{14})+/ & /.*a.{20}/ & /.*b.{21}/",
    ],
)
def test_what_takes_too_much_is_told_so(checks: GrammarChecks, grammar: str) -> None:
    problem = patient_verdict(checks, grammar).problem
    assert problem
    if grammar == ENDLESS:
        assert "too complex" in problem and ("1 s of CPU time" in problem or "128 MiB" in problem)


def test_memory_is_bounded(make: Callable[..., GrammarChecks]) -> None:
    assert "128 MiB of memory" in verdict(make(quick_cpu_s=50.0), ENDLESS).problem


def test_time_is_bounded(make: Callable[..., GrammarChecks]) -> None:
    assert "0.05 s of CPU time" in verdict(make(quick_cpu_s=0.02, slow_cpu_s=0.05), ENDLESS).problem


def test_a_crash_is_the_grammars_problem_alone(checks: GrammarChecks) -> None:
    verdict(checks, TRIVIAL)
    before, nested = pid_of(checks), "(" * 60_000 + '"a"' + ")" * 60_000
    assert verdict(checks, f"start: {nested}").problem
    assert pid_of(checks) == before
    assert verdict(checks, 'start: "other"').problem == ""


@pytest.mark.slow
def test_slow_ones_do_not_keep_a_quick_one_waiting(make: Callable[..., GrammarChecks]) -> None:
    checks = make(slow_cpu_s=3.0)
    slow = [checks.submit(ENDLESS + " " * i) for i in range(12)]
    assert verdict(checks, TRIVIAL).problem == ""
    assert sum(future.done() for future in slow) < len(slow), "they were waited for"


def test_verdicts_are_kept_and_shared(checks: GrammarChecks) -> None:
    assert checks.submit(grammar := 'start: "once"') is checks.submit(grammar)
    first = verdict(checks, grammar)
    assert checks.submit(grammar).result(0) is first
    assert not checks.submit(grammar).cancel()


def test_a_verdict_is_found_by_its_own_salt_alone(checks: GrammarChecks) -> None:
    grammar = 'start: "of one tenant"'
    first = verdict(checks, grammar)
    for salt in ("a", "b"):
        asked = checks.submit(grammar, salt=salt)
        other = asked.result(WAIT_S)
        assert other is not first and other.problem == ""
        assert checks.submit(grammar, salt=salt).result(0) is other


def test_owners_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "LANES", 1)
    lane, opened, begun, ran = checks_module._Lane("turns"), threading.Event(), threading.Event(), list[str]()
    lane.submit("greedy", lambda: (begun.set(), opened.wait(WAIT_S)))
    assert begun.wait(WAIT_S)
    for job in ("greedy 1", "greedy 2", "greedy 3", "modest 1", "other 1", "modest 2"):
        lane.submit(job.split()[0], lambda job=job: ran.append(job))
    opened.set()
    wait_until(lambda: len(ran) == 6)
    lane.close()
    assert ran == ["greedy 1", "modest 1", "other 1", "greedy 2", "modest 2", "greedy 3"]


def test_one_owner_cannot_have_all_places(make: Callable[..., GrammarChecks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PENDING", 4)
    checks = make()
    for i in range(2):
        checks.submit(ENDLESS + " " * i, owner="greedy")
    with pytest.raises(Unavailable, match=r"Too many grammars \(2\) of this API key"):
        checks.submit(TRIVIAL, owner="greedy")
    assert checks.submit(TRIVIAL, owner="modest").result(WAIT_S).problem == ""


def test_kept_verdicts_are_bounded(make: Callable[..., GrammarChecks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_VERDICTS", 3)
    checks = make()
    for i in range(6):
        verdict(checks, f'start: "{i}"')
    assert len(checks._verdicts) == 3


def test_what_waits_is_bounded(make: Callable[..., GrammarChecks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PENDING", 2)
    checks = make()
    for i in range(2):
        checks.submit(ENDLESS + " " * i)
    with pytest.raises(Unavailable, match="queue is full"):
        checks.submit(TRIVIAL)


def test_a_fault_of_the_writer_is_logged_by_its_place(
    make: Callable[..., GrammarChecks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client's request is refused, not the server's failure; its text is in no log."""
    program = "from common.grammar.compiler import main\ndef write(text): return text.missing\nmain(write)\n"
    (tmp_path / "faulty_writer.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = make(program="faulty_writer")
    for text in ("secret", "another secret"):
        assert verdict(checks, text).problem == "internal error while converting the grammar"
    assert "AttributeError in" in caplog.text and "line 2" in caplog.text and "secret" not in caplog.text
    assert caplog.text.count("the writer failed") == 1


@pytest.mark.slow
def test_a_process_that_died_is_started_again(make: Callable[..., GrammarChecks]) -> None:
    checks = make()
    verdict(checks, TRIVIAL)
    assert checks._compiler is not None
    before, asked = pid_of(checks), checks._compiler._asked
    os.kill(before, signal.SIGSTOP)
    waiting = checks.submit(ENDLESS)
    wait_until(lambda: asked)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(Unavailable, match="could not be checked"):
        waiting.result(WAIT_S)
    assert verdict(checks, 'start: "new"').problem == ""
    assert pid_of(checks) != before


@pytest.mark.slow
def test_a_process_that_stands_still_is_killed(make: Callable[..., GrammarChecks]) -> None:
    checks = make(answer_s=2.0)
    checks.start()
    os.kill(pid_of(checks), signal.SIGSTOP)
    with pytest.raises(Unavailable):
        verdict(checks, TRIVIAL)


@pytest.mark.slow
def test_it_ends_with_the_one_that_started_it() -> None:
    program = (
        "import time; from common.model_files.resolve import resolve_model\n"
        "from common.grammar.checks import GrammarChecks\n"
        f"checks = GrammarChecks(resolve_model('tiny-random'), {VOCAB_SIZE})\n"
        f"checks.submit({TRIVIAL!r}).result(60)\n"
        "print(checks._compiler._process.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closing_ends_what_waits(make: Callable[..., GrammarChecks]) -> None:
    checks = make()
    waiting = checks.submit(ENDLESS)
    checks.close()
    with pytest.raises(Unavailable, match="shutting down"):
        waiting.result(0)
    with pytest.raises(Unavailable, match="shutting down"):
        checks.submit(TRIVIAL)


# ---------------------------------------------------------------- a worker's


@pytest.fixture
def worker(make: Callable[..., GrammarChecks]) -> Iterator[Grammars]:
    made = Grammars(resolve_model("tiny-random"), VOCAB_SIZE, make(slow_cpu_s=0.2))
    yield made
    made.close()


def compiled(worker: Grammars, grammar: str) -> CompiledGrammar:
    done, found = threading.Event(), []
    known = worker.get(grammar, lambda each: (found.append(each), done.set()))
    if known is None:
        assert done.wait(WAIT_S)
    return known or found[0]


@pytest.mark.slow
def test_asking_never_waits(worker: Grammars) -> None:
    """However long the process takes to start, and whatever is being compiled."""
    told: list[CompiledGrammar] = []
    assert worker.get(ENDLESS, told.append) is None
    assert worker.get(TRIVIAL, told.append) is None
    assert compiled(worker, TRIVIAL).problem == ""
    found = compiled(worker, ENDLESS)
    assert found.problem and found.is_final
    assert [each.grammar for each in told] == [TRIVIAL, ENDLESS]
    assert worker.get(TRIVIAL, told.append) is compiled(worker, TRIVIAL)


@pytest.mark.slow
def test_what_was_not_found_out_is_asked_again(worker: Grammars) -> None:
    compiled(worker, TRIVIAL)
    lost = threading.Event()
    found: list[CompiledGrammar] = []
    os.kill(pid_of(worker._checks), signal.SIGSTOP)  # on a busy machine it would find out before it is killed
    assert worker.get(ENDLESS, lambda each: (found.append(each), lost.set())) is None
    compiler = worker._checks._compiler
    wait_until(lambda: compiler is not None and compiler._asked)  # else the next process is asked
    os.kill(pid_of(worker._checks), signal.SIGKILL)
    assert lost.wait(WAIT_S)
    assert found[0].problem and not found[0].is_final
    assert compiled(worker, ENDLESS).is_final


def test_a_compiled_grammar_is_found_by_its_own_salts_alone(worker: Grammars) -> None:
    known = compiled(worker, TRIVIAL)
    told, done = list[CompiledGrammar](), threading.Event()
    assert worker.get(TRIVIAL, lambda each: (told.append(each), done.set()), "other") is None
    assert done.wait(WAIT_S) and told[0].problem == "" and told[0] is not known
    assert worker.get(TRIVIAL, told.append, "other") is told[0]
    assert worker.get(TRIVIAL, told.append) is told[0], "the first salt still finds it"


def test_the_cache_is_bounded_in_bytes_and_in_number(worker: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)
    for i in range(6):
        compiled(worker, f'start: "{i}"')
    assert len(worker._compiled) == 3
    one = next(iter(worker._compiled.values())).num_bytes
    assert one > 0
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", one // 2)
    compiled(worker, 'start: "more than there is room for"')
    assert len(worker._compiled) == 1


@pytest.mark.slow
def test_an_answer_beyond_the_bounds_does_not_spoil_the_next(worker: Grammars) -> None:
    """Answers of one grammar share what the library computed, and its exhaustion."""
    grammar = "start: /([^x]{0,400}y){0,400}/"
    constraint = compiled(worker, grammar).constraint()
    text: list[int] = []
    while not constraint.problem:
        text.append(ord("y") if len(text) % 3 == 2 else ord("z"))
        constraint.allowed(text)
        assert len(text) < 5000
    again = compiled(worker, grammar).constraint()
    again.allowed(text[:3])
    assert again.problem == ""
