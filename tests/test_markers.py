"""The markers that tests/conftest.py reads."""

from __future__ import annotations

import pytest

from . import conftest

pytest_plugins = ["pytester"]
CASES = (
    'import pytest\n@pytest.mark.{}\n@pytest.mark.parametrize("case", ["first", "second"])\ndef test_it(case): pass\n'
)


def test_ids_in_markers_select_slow_cases_and_must_exist(pytester: pytest.Pytester) -> None:
    markers = "\n ".join(("slow", "slow_cases", "slow_except", "timeout"))
    pytester.makeini(f"[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n {markers}\n")
    for number, marker in enumerate(('cases("first", "third")', 'except("third")', 'cases("sec*", "th*")')):
        pytester.makepyfile(**{f"test_wrong_{number}": CASES.format(f"slow_{marker}")})
    for number, marker in enumerate(('cases("first")', 'except("first")', 'cases("sec*")')):
        pytester.makepyfile(**{f"test_right_{number}": CASES.format(f"slow_{marker}")})
    found = pytester.inline_run("--collect-only", plugins=[conftest])
    failed = [str(report.longrepr) for report in found.getreports("pytest_collectreport") if report.failed]
    assert len(failed) == 3 and all("test_it: slow_" in text and "'th" in text for text in failed)
    (call,) = found.getcalls("pytest_collection_modifyitems")
    slow = [item.nodeid for item in call.items if item.get_closest_marker("slow")]
    assert slow == [
        f"test_right_{number}.py::test_it[{case}]" for number, case in enumerate(("first", *["second"] * 2))
    ]
