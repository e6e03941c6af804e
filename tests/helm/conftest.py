from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .chart import EXAMPLES, Rendered, render
from .programs import NotAvailable, helm


def get_helm(major: int) -> Path:
    try:
        return helm(major)
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def helm3() -> Path:
    return get_helm(3)


@pytest.fixture(scope="session")
def helm4() -> Path:
    return get_helm(4)


@pytest.fixture(scope="session", params=(3, 4), ids=("helm3", "helm4"))
def either_helm(request: pytest.FixtureRequest) -> Path:
    return get_helm(request.param)


@pytest.fixture(scope="session")
def promtool() -> str:
    return found("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return found("prometheus")


def found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install prometheus)")
    return path


@pytest.fixture(scope="module", params=("", *EXAMPLES), ids=lambda name: name or "default")
def rendered(request: pytest.FixtureRequest, helm4: Path) -> Rendered:
    return render(helm4, *((request.param,) if request.param else ()))
