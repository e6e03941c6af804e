"""The one command for a GPU machine: packages from wheels, parts that end in time, a log of each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = "benchmarks/gpu_machine.sh"
NAME = "gift-1.dist-info"


@pytest.fixture
def tree(tmp_path: Path, repository: Path) -> Path:
    """A tree that has the script, and a wheel beside it."""
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "wheels").mkdir()
    shutil.copy(repository / SCRIPT, tree / SCRIPT)
    with zipfile.ZipFile(tree / "wheels" / "gift-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gift.py", "BOX = 'a ribbon'\n")
        wheel.writestr(f"{NAME}/METADATA", "Metadata-Version: 2.1\nName: gift\nVersion: 1\n")
        wheel.writestr(
            f"{NAME}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{NAME}/RECORD", "")
    return tree


def run(tree: Path, *parts: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | more
    command = ["bash", str(tree / SCRIPT), str(tree / "out"), *parts]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.slow
def test_each_part_ends_in_time_and_leaves_its_log(tree: Path) -> None:
    done = run(tree, "do.good:60:$PYTHON -P -c 'import gift; print(gift.BOX)'", "do.slow:1:echo begun; sleep 90", "x:9")
    assert (done.returncode, done.stderr) == (1, "")
    assert (tree / "out" / "do.good.log").read_text() == "a ribbon\n"
    assert (tree / "out" / "do.slow.log").read_text() == "begun\n"
    assert "do.good: exit status 0" in done.stdout and "do.slow: exit status 124" in done.stdout
    assert "there is no part x" in done.stdout


def test_the_node_part_leaves_its_results_in_the_folder(tree: Path) -> None:
    done = run(tree, "node:300:--dry-run --parts chip", PYTHON="echo", WHEELS="none")
    assert done.returncode == 0, done.stdout
    told = (tree / "out" / "node.log").read_text().strip()
    assert told == f"-P -m benchmarks.gpu.node --out {tree / 'out'} --time-limit-s 260 --dry-run --parts chip"


@pytest.mark.slow
def test_all_parts_together_end_in_time(tree: Path) -> None:
    done = run(tree, "do:60:true", LIMIT_S="1")
    assert done.returncode == 1 and "do: left out, the time is over" in done.stdout
