"""What Triton's `warp_specialize` makes of attention's loop, so that a version that takes it is noticed.

Decision 66 has what follows from it: a failure here is a reason to look at that again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LOOPS = Path(__file__).with_name("specialised_loops.py")
IGNORED = {"90,8,128,one": 8}
"""Case -> warps, those that were asked for."""
TAKEN = {"90,4,64,one": 12, "100,4,128,one": 12, "100,8,128,one": 16, "100,4,128,pointers": 12}
"""Case -> warps, with those of partitions."""
REFUSED = ("90,4,128,one", "90,4,64,pointers", "90,4,64,two", "100,4,128,two", "100,8,128,two")
"""By a pass of the compiler that fails."""


@pytest.mark.cpu
@pytest.mark.timeout(300)
def test_what_becomes_of_a_specialised_loop(tmp_path: Path) -> None:
    cases = [*IGNORED, *TAKEN, *REFUSED]
    done = subprocess.run(
        [sys.executable, "-P", str(LOOPS), *cases],
        env={"TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    assert {case: found[case]["warps"] for case in cases} == {**IGNORED, **TAKEN, **dict.fromkeys(REFUSED, 0)}
    assert [case for case in cases if found[case]["setmaxnreg"]] == list(TAKEN)
