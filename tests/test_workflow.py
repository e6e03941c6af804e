"""The workflows of pull requests and releases: linted, and they call only targets of the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(params=["ci.yaml", "release.yaml"])
def workflow(repository: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    text = (repository / ".github" / "workflows" / request.param).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_linter_finds_nothing(repository: Path) -> None:
    actionlint = Path(sys.executable).with_name("actionlint")
    if not actionlint.exists():
        pytest.skip("actionlint is not installed")
    command = (str(actionlint), "-shellcheck=")  # every workflow of the repository
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_target_is_one_of_the_makefile(repository: Path, workflow: dict[str, Any]) -> None:
    lines = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    called = set(re.findall(r"\bmake ([\w-]+)", "\n".join(lines)))
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    for target in called:
        assert re.search(rf"(?m)^{target}:", makefile), f"a workflow runs `make {target}`: add it to the Makefile"
    assert called
    given = {name for job in workflow["jobs"].values() for step in job["steps"] for name in step.get("env", ())}
    for name in given & {"TORCH_INDEX", "IMAGES", "PYTHON_IMAGE", "REGISTRY"}:
        assert re.search(rf"(?m)^{name} \?=", makefile), f"a workflow sets {name}: write `{name} ?=` in the Makefile"


def test_every_job_says_what_it_may(workflow: dict[str, Any]) -> None:
    """The token has no rights by default, and no value of an event is pasted into a script."""
    assert workflow["permissions"] == {}, "set `permissions: {}` for the workflow, and rights for each job"
    for name, job in workflow["jobs"].items():
        assert job["permissions"] and job["timeout-minutes"], f"set permissions and timeout-minutes of job {name}"
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), f"pass values to this step of {name} in `env`: {step['run']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("registry", "said"),
    (("", "REGISTRY: it is not set"), ("acme", "REGISTRY: 'acme' names no host")),
)
def test_make_says_what_has_to_be_set(registry: str, said: str, repository: Path) -> None:
    command = ("make", "--no-print-directory", "images", f"PYTHON={sys.executable}", f"REGISTRY={registry}")
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"make images: {said}" in done.stderr
