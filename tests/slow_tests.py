"""Which tests only `make test-all` runs: the list of tests/slow.txt, which says how it is written."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

SLOW = Path(__file__).with_name("slow.txt")
QUICK = "! "


@dataclass(frozen=True)
class SlowTests:
    """Beginnings of ids of tests; what is in `quick` is an exception to `slow`."""

    slow: tuple[str, ...]
    quick: tuple[str, ...]

    def __contains__(self, test: str) -> bool:
        return test.startswith(self.slow) and not test.startswith(self.quick)

    def holds_all_of(self, file: str) -> bool:
        """Whether each test of a file is slow, so that a quick run need not import it."""
        return f"{file}::" in self.slow and not any(test.startswith(f"{file}::") for test in self.quick)


def read_slow_tests(text: str) -> SlowTests:
    """The tests that a list names, in the form of tests/slow.txt."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    slow, quick, file = [], [], ""
    for line, below in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        name = line.strip()
        if not line.startswith(" "):
            file = f"{name}::"
            slow += [file] if not below.startswith(" ") or below.strip().startswith(QUICK) else []
        elif name.startswith(QUICK):
            quick.append(file + name.removeprefix(QUICK))
        else:
            slow.append(file + name)
    return SlowTests(tuple(slow), tuple(quick))
