"""What a change touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from .touched import IN_SYSTEMS, PACKAGES, touched


@pytest.mark.parametrize(
    ("files", "paths"),
    [
        (["docs/api.md", "README.md"], []),
        (["helm/values.yaml"], ["tests/helm"]),
        (["kernels/sampling.py"], ["tests/chaos", "tests/e2e", "tests/kernels"]),
        (["tests/router/api/test_chat.py"], ["tests/router"]),
        (["benchmarks/stack.py", "tests/helm/conftest.py"], ["tests/benchmarks", "tests/helm"]),
        (["tests/forge.py"], ["tests"]),
        (["tests/clients/conftest.py", "docs/compatibility.md"], []),
        (["kernels/sampling.py", "pyproject.toml"], ["tests"]),
    ],
)
def test_a_change_touches_the_tests_of_its_packages(files: list[str], paths: list[str]) -> None:
    assert touched(files) == paths


def test_every_package_has_its_folder_of_tests(repository: Path) -> None:
    packages = {path.parent.name for path in repository.glob("*/__init__.py")} - {"tests"}
    assert packages | {"helm"} == set(PACKAGES) and set(PACKAGES) > IN_SYSTEMS
    assert all((repository / "tests" / name).is_dir() for name in PACKAGES)
