"""schemathesis against the schema that a running router publishes: whatever is asked, the answer is one it describes.

An answer is right when it is no server error, has a documented status and a body of the documented shape: for an error
that is OpenAI's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack

from ..rig import owned, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(sys.executable).with_name("schemathesis")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "unsupported_method", "allow_header_conformance"),
)
MANAGING = ("/api/pull", "/api/delete", "/pause", "/sleep")
"""Endpoints that change the caches of this machine, or hold every other request. They are not asked."""


@pytest.fixture
def short(system_of: Any) -> Stack:
    """Answers that fill the context are soon full."""
    found: Stack = system_of(worker_flags=("--max-model-len", "128")).stack
    return found


def run(stack: Stack, folder: Path, *options: str, timeout_s: float) -> None:
    flags = ("--checks", ",".join(CHECKS), "--seed", "1", "--request-timeout", "60", "--no-shrink", "--warnings", "off")
    options = (*options, *(flag for path in MANAGING for flag in ("--exclude-path", path)))
    command = [str(PROGRAM), "run", f"{stack.url}/openapi.json", *flags, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    paths = httpx.get(f"{stack.url}/openapi.json", trust_env=False, timeout=30).json()["paths"]
    assert f"{sum(len(found) for path, found in paths.items() if path not in MANAGING)} selected" in done.stdout and {
        "/v1/completions",
        "/load",
    } <= set(paths)
    assert stack.router.alive and "Traceback" not in stack.router.log.read_text()
    assert httpx.get(f"{stack.url}/health", trust_env=False, timeout=30).status_code == 200
    wait_until(lambda: not any(owned(stack).values()), "every block is given back")


def test_the_boundaries_of_every_field(short: Stack, tmp_path: Path) -> None:
    run(short, tmp_path, "--phases", "coverage", "--max-time", "40", timeout_s=300)


def test_random_requests(short: Stack, tmp_path: Path) -> None:
    run(short, tmp_path, "--phases", "fuzzing", "--max-time", "30", timeout_s=300)
