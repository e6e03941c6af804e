"""A setting, endpoint or metric that the documentation does not name fails here."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from benchmarks.load.config import BenchConfig
from common.config import CONFIG_CLASSES
from common.config.field import Config, fields_of
from router.cli.main import COMMANDS

PACKAGES = ("common", "prefill_worker", "decode_worker", "router")
METRIC = re.compile(r"(vllm:|diptych_)[a-z0-9_]+")
ROUTE_METHODS = {"get", "post", "put", "delete", "api_route", "Route"}


@functools.cache
def calls_in(repository: Path) -> list[tuple[str, str]]:
    """(called name, first argument) for every call in our packages whose first argument is a literal string."""
    found = []
    for package in PACKAGES:
        for file in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if isinstance(node.args[0].value, str):
                    found.append((name, node.args[0].value))
    return found


def check_named(names: set[str], page: Path) -> None:
    """Each name stands in a page."""
    text = page.read_text(encoding="utf-8")
    missing = [name for name in names if not re.search(rf"(?<![\w/:-]){re.escape(name)}(_total)?(?![\w-])", text)]
    assert not missing, f"document in {page.name}: {', '.join(sorted(missing))}"


def test_the_configuration_page_is_what_make_docs_writes(repository: Path) -> None:
    page = runpy.run_path(str(repository / "docs" / "write_configuration.py"))
    assert (repository / "docs" / "configuration.md").read_text(encoding="utf-8") == page["render"](), "run `make docs`"


@pytest.mark.parametrize("cls", (*CONFIG_CLASSES, BenchConfig))
def test_every_flag_is_documented(repository: Path, cls: type[Config]) -> None:
    check_named({field.flag for field in fields_of(cls)}, repository / "docs" / "configuration.md")


def test_every_endpoint_is_documented(repository: Path) -> None:
    routes = {path for name, path in calls_in(repository) if name in ROUTE_METHODS and path.startswith("/")}
    paths = {path.replace(":path}", "}") for path in routes}
    assert {"/health", "/ready", "/metrics"} <= paths
    check_named(paths, repository / "docs" / "api.md")


def test_every_metric_is_documented(repository: Path) -> None:
    names = {text for _, text in calls_in(repository) if METRIC.fullmatch(text)}
    assert {"vllm:num_requests_running", "diptych_kv_blocks"} <= names
    check_named(names, repository / "docs" / "metrics.md")


def test_every_command_is_in_the_readme(repository: Path) -> None:
    check_named(set(COMMANDS), repository / "README.md")


def test_the_clients_that_were_tried_are_those_that_tests_pin(repository: Path) -> None:
    """Each row of docs/compatibility.md has the versions that are installed, and names a test that exists."""
    page = (repository / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| `(\w+\.py)::(\w+)` \|$", page, re.MULTILINE)
    pinned = tomllib.loads((repository / "tests" / "clients" / "versions.toml").read_text(encoding="utf-8"))
    wanted = [
        ", ".join(re.sub(r"\[\w+\]", "", one).replace("==", " ") for one in row["requires"]) for row in pinned.values()
    ]
    versions = [version for version, _, _ in rows if not version.startswith("requests of ")]
    hint = "name the versions of tests/clients/versions.toml in docs/compatibility.md, after a run of `make clients`"
    assert sorted(versions) == sorted(wanted), hint
    for _, file, name in rows:
        tree = ast.parse((repository / "tests" / "clients" / file).read_text(encoding="utf-8"))
        assert any(name in names_defined_by(node) for node in tree.body), (
            f"docs/compatibility.md names {name}, which {file} does not define"
        )


def test_the_map_names_what_exists(repository: Path) -> None:
    """Each row of the questions in docs/architecture.md has a file and a name that is defined in it."""
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\? \| `([\w/]+\.py)` \| `([\w.]+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 20
    wrong = []
    for path, name in rows:
        scope: list[ast.stmt] = ast.parse((repository / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [node for node in scope if part in names_defined_by(node)]
            scope = found[0].body if found and isinstance(found[0], ast.ClassDef) else []
            if not found:
                wrong.append(f"docs/architecture.md names {name}, which {path} does not define")
                break
    assert not wrong, "\n".join(wrong)


def names_defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
