"""helm accepts every helm command in the documentation, and the chart accepts its values."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from .chart import CHART, OPERATORS
from .test_upgrades import api_server

pytestmark = pytest.mark.helm

ROOT = CHART.parent
PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md")), CHART / "README.md", *CHART.glob("examples/*.yaml")]
COMMAND = re.compile(r"^(?:#? *)(helm (?:install|upgrade|template|rollback|history|test|uninstall) [^`|]+?)$", re.M)
ROUTE = {"enabled": True, "hostnames": ["llm.example.com"], "parentRefs": [{"name": "gateway"}]}
VALUES = {
    "images": {"registry": "registry.example.com"},
    "models": {"model": {"source": {"id": "smollm2-135m"}}},
    "httpRoute": ROUTE,
}
"""The operator's own values.yaml of the commands."""

RELEASED = {
    "name": "demo",
    "namespace": "llm",
    "version": 1,
    "info": {"status": "deployed"},
    "config": VALUES,
    "chart": {
        "metadata": {"name": "diptych", "version": "0.0.1", "apiVersion": "v2"},
        "templates": [],
        "values": {"images": {"registry": "old"}},  # an earlier chart, which had few of today's values
    },
}
"""The release that an upgrade finds."""


def printed() -> list[tuple[str, str]]:
    """Return (page, command) for each printed command."""
    texts = {page: page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES}
    found = [(str(page.relative_to(ROOT)), each) for page, text in texts.items() for each in COMMAND.findall(text)]
    return [(page, command.partition("  #")[0]) for page, command in found]


def test_commands_are_found() -> None:
    assert len(printed()) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), printed(), ids=lambda text: text if text.startswith("helm") else "")
def test_helm_takes_it(helm4: Path, tmp_path: Path, page: str, command: str) -> None:
    words = shlex.split(
        command.replace("oci://ghcr.io/acme/charts/diptych", "helm --set images.registry=ghcr.io/acme")
        .replace("helm/examples", str(CHART / "examples"))
        .replace("-MODEL", "-model")
    )
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(VALUES))
    (tmp_path / "helm").symlink_to(CHART)
    verb = words[1]
    if verb in ("install", "upgrade"):
        words += ["--dry-run=server"]
    elif verb != "template":  # needs a release: helm checks the flags before it prints its help
        words += ["--help"]
    if "--create-namespace" in words and verb == "template":
        words.remove("--create-namespace")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "HELM_DRIVER": "memory"}
    environment["HELM_MEMORY_DRIVER_DATA"] = "releases"
    (tmp_path / "releases").write_text(yaml.safe_dump([RELEASED] if verb == "upgrade" else []))
    apis = [flag for api in OPERATORS for flag in ("--api-versions", api)] if verb == "template" else []
    with api_server({}) as server:
        line = [str(helm4), *words[1:], *apis, "--kube-apiserver", server]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{page}: {command}\n{done.stderr}"
