"""What tests/conftest.py reads and prevents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import conftest

pytest_plugins = ["pytester"]
CASES = (
    'import pytest\n@pytest.mark.{}\n@pytest.mark.parametrize("case", ["first", "second"])\ndef test_it(case): pass\n'
)
COVERED = (
    'import pytest\n@pytest.mark.quick_cover(1)\n@pytest.mark.parametrize("two", ["c", "d"])\n'
    '@pytest.mark.parametrize("one", ["a", "b"])\ndef test_it(one, two): pass\n'
)


def test_ids_in_markers_select_slow_cases_and_must_exist(pytester: pytest.Pytester) -> None:
    markers = "\n ".join(("slow", "slow_cases", "slow_except", "quick_cover", "timeout"))
    pytester.makeini(f"[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n {markers}\n")
    for number, marker in enumerate(('cases("first", "third")', 'except("third")', 'cases("sec*", "th*")')):
        pytester.makepyfile(**{f"test_wrong_{number}": CASES.format(f"slow_{marker}")})
    for number, marker in enumerate(('cases("first")', 'except("first")', 'cases("sec*")')):
        pytester.makepyfile(**{f"test_right_{number}": CASES.format(f"slow_{marker}")})
    pytester.makepyfile(test_right_3=COVERED)
    found = pytester.inline_run("--collect-only", plugins=[conftest])
    failed = [str(report.longrepr) for report in found.getreports("pytest_collectreport") if report.failed]
    assert len(failed) == 3 and all("test_it: slow_" in text and "'th" in text for text in failed)
    (call,) = found.getcalls("pytest_collection_modifyitems")
    slow = [item.nodeid for item in call.items if item.get_closest_marker("slow")]
    assert slow == [
        *(f"test_right_{number}.py::test_it[{case}]" for number, case in enumerate(("first", *["second"] * 2))),
        *(f"test_right_3.py::test_it[{case}]" for case in ("a-d", "b-c")),
    ]


@pytest.mark.parametrize(("strength", "num"), [(1, 4), (2, 12), (3, 24), (4, 24)])
def test_a_cover_has_every_combination_in_few_cases(strength: int, num: int) -> None:
    sizes = (4, 3, 2)
    cases = [(*case, case[1]) for case in itertools.product(*map(range, sizes))]  # the last two of one parametrize
    items: Sequence[Any] = [SimpleNamespace(values=case, callspec=call_of(case)) for case in cases]
    beyond = [*map(id, conftest.beyond_a_cover(items, strength))]
    quick = [item.values for item in items if id(item) not in beyond]
    assert len(quick) == num
    for some in itertools.combinations(range(3), min(strength, 3)):
        together = {tuple(values[axis] for axis in some) for values in quick}
        assert together == set(itertools.product(*(range(sizes[axis]) for axis in some)))


def call_of(case: Sequence[int]) -> SimpleNamespace:
    return SimpleNamespace(params=dict(zip("abcd", case, strict=True)))


def test_functions_marked_slow_are_not_collected_without_slow_tests(pytester: pytest.Pytester) -> None:
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n slow\n quick_cover\n timeout\n"
    )
    pytester.makepyfile("import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_quick(): pass\n")
    for flags, expected in ((("-m", "not slow"), ["test_quick"]), ((), ["test_slow", "test_quick"])):
        found = pytester.inline_run("--collect-only", *flags, plugins=[conftest])
        (call,) = found.getcalls("pytest_collection_modifyitems")
        assert [item.name for item in call.items] == expected


def test_no_test_sets_the_clock_of_servers_that_run_in_its_process(repository: Path) -> None:
    """A test that replaces `time.monotonic`, not the `time` of one module, stops timers of every event loop."""
    changed = re.compile(r"""setattr\((?:\w+\.)*(?:time|asyncio), ["']""")
    files = (repository / "tests").rglob("*.py")
    assert [path.name for path in files if changed.search(path.read_text(encoding="utf-8"))] == []
