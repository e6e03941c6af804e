"""A worker compiles its kernels when it starts: a step that waits for a compiler makes every stream wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LAUNCHES = Path(__file__).with_name("launches.py")


@pytest.mark.interpret
@pytest.mark.parametrize(("architecture", "options"), [("llama", []), ("gemma3", []), ("llama", ["batch-invariant"])])
def test_nothing_is_compiled_after_the_start(tmp_path: Path, architecture: str, options: list[str]) -> None:
    """Nor does Triton warn of an option whose default will be another one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "error::UserWarning", str(LAUNCHES), architecture, str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    for role, kernels in json.loads(done.stdout).items():
        assert {"attend_query_tiles", "attend_splits", "reduce_splits", "draw_tokens"} <= set(kernels["begin"]), role
        assert ("multiply_held" in kernels["begin"]) == bool(options), role
        assert kernels["later"] == [], role
