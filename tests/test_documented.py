"""A setting, endpoint or metric that the documentation does not name fails here, and so does a file that is gone."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.load.config import BenchConfig
from common.config import CONFIG_CLASSES
from common.config.field import Config, fields_of
from common.config.vllm import MEANINGLESS
from common.engine.vllm.requests import API_NAMES, MAX_LOGPROB_TOKEN_IDS, WITHOUT_DRAFTS
from router.cli.main import COMMANDS

PACKAGES = ("common", "prefill_worker", "decode_worker", "router")
TREE = (*PACKAGES, "kernels", "benchmarks", "tests", "helm", "deploy", "docs")
METRIC = re.compile(r"(vllm:|diptych_)[a-z0-9_]+")
PATH_OR_METRIC = re.compile(rf"""["'](/|{METRIC.pattern})""")
ROUTE_METHODS = {"get", "post", "put", "delete", "api_route", "Route"}


@functools.cache
def calls_in(repository: Path) -> list[tuple[str, str]]:
    """(called name, first argument) of each call in our packages whose first argument is a path or a metric."""
    found = []
    for package in PACKAGES:
        for file in (repository / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if not PATH_OR_METRIC.search(text):  # parsing every file takes a second
                continue
            for node in ast.walk(ast.parse(text)):
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
    page = runpy.run_path(str(repository / "docs" / "reference" / "write_configuration.py"))
    written = (repository / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert written == page["render"](), "run `make docs`"


@pytest.mark.parametrize("cls", (*CONFIG_CLASSES, BenchConfig))
def test_every_flag_is_documented(repository: Path, cls: type[Config]) -> None:
    check_named({field.flag for field in fields_of(cls)}, repository / "docs" / "reference" / "configuration.md")


def test_every_endpoint_is_documented(repository: Path) -> None:
    routes = {path for name, path in calls_in(repository) if name in ROUTE_METHODS and path.startswith("/")}
    paths = {path.replace(":path}", "}") for path in routes}
    assert {"/health", "/ready", "/metrics"} <= paths
    check_named(paths, repository / "docs" / "reference" / "api.md")


def test_every_metric_is_documented(repository: Path) -> None:
    names = {text for _, text in calls_in(repository) if METRIC.fullmatch(text)}
    assert {"vllm:num_requests_running", "diptych_kv_blocks"} <= names
    check_named(names, repository / "docs" / "reference" / "metrics.md")


def test_what_vllm_does_not_support_is_documented(repository: Path) -> None:
    page = (repository / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
    options = re.search(r"that vLLM does not have are rejected: ([^.]*)\.", page)
    parameters = re.search(r"with `-- --speculative-config`: (.*)", page)
    assert options is not None and parameters is not None
    named = {name.replace("-", "_") for name in re.findall(r"`--(?:no-)?([a-z-]+)`", options[1])}
    assert named == set(MEANINGLESS)
    assert re.findall(r"`(\w+)`", parameters[1]) == [API_NAMES.get(name, name) for name in WITHOUT_DRAFTS]
    assert f"`logprob_token_ids` on a CPU, and more than {MAX_LOGPROB_TOKEN_IDS} on a GPU" in page


def test_every_command_is_documented(repository: Path) -> None:
    check_named(set(COMMANDS), repository / "docs" / "reference" / "command-line.md")


def test_the_clients_that_were_tried_are_those_that_tests_pin(repository: Path) -> None:
    """Each row of docs/reference/clients.md has the versions that are installed, and names a test that exists."""
    page = (repository / "docs" / "reference" / "clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| `(\w+\.py)::(\w+)` \|$", page, re.MULTILINE)
    pinned = tomllib.loads((repository / "tests" / "clients" / "versions.toml").read_text(encoding="utf-8"))
    wanted = [
        ", ".join(
            re.sub(r"\[[\w,]+\]", "", re.sub(r"==|\b@", " ", one)) for one in row.get("npm", []) + row["requires"]
        )
        for row in pinned.values()
    ]
    versions = [version for version, _, _ in rows if not version.startswith("requests of ")]
    hint = "run `make clients`, and name the versions of tests/clients/versions.toml in docs/reference/clients.md"
    assert sorted(versions) == sorted(wanted), hint
    for _, file, name in rows:
        tree = ast.parse((repository / "tests" / "clients" / file).read_text(encoding="utf-8"))
        assert any(name in names_defined_by(node) for node in tree.body), (
            f"docs/reference/clients.md names {name}, which {file} does not define"
        )


def test_the_map_names_what_exists(repository: Path) -> None:
    """Each row of the questions in docs/concepts/architecture.md has a file and a name that is defined in it."""
    page = (repository / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\? \| `([\w/]+\.py)` \| `([\w.]+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 20
    wrong = []
    for path, name in rows:
        scope: list[ast.stmt] = ast.parse((repository / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [node for node in scope if part in names_defined_by(node)]
            scope = found[0].body if found and isinstance(found[0], ast.ClassDef) else []
            if not found:
                wrong.append(f"docs/concepts/architecture.md names {name}, which {path} does not define")
                break
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere(repository: Path) -> None:
    """Each relative link of a page leads to a file, and to a heading of it where it names one."""
    wrong = []
    for page in pages(repository):
        for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text(encoding="utf-8")):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or heading and heading not in headings(target):
                wrong.append(f"{page.relative_to(repository)} links to {link}")
    assert not wrong, "\n".join(wrong)


def pages(repository: Path) -> list[Path]:
    return [*repository.glob("*.md"), *(page for top in TREE for page in (repository / top).rglob("*.md"))]


@functools.cache
def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.strip().lower()).replace(" ", "-") for line in lines}


def test_files_that_texts_name_exist(repository: Path) -> None:
    """Files of this tree that pages, docstrings and comments name; NAME and MAKER stand for any name."""
    kinds = {".py", ".pyi", ".h", ".cpp", ".sh", ".toml"}
    files = [file for top in TREE for file in (repository / top).rglob("*") if file.suffix in kinds]
    names = {file.name for file in files}
    texts = [*files, *pages(repository), repository / "pyproject.toml"]
    texts.remove(repository / "CHANGELOG.md")  # which names what there was
    wrong = []
    for file in texts:
        text, here = file.read_text(encoding="utf-8"), file.relative_to(repository)
        for path in re.findall(rf"(?<![\w/.-])(?<!'s )(?:{'|'.join(TREE)})/[\w/]+\.(?:pyi?|h|cpp|sh|toml|md)\b", text):
            if not re.search("NAME|MAKER", path) and not (repository / path).exists():
                wrong.append(f"{here} names {path}")
        if file.suffix != ".md":
            wrong += [f"{here} names {name}" for name in re.findall(r"`(\w+\.pyi?)`", text) if name not in names]
    assert not wrong, "\n".join(wrong)


def test_what_make_check_runs_exists(repository: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}  # without the flags of a make that runs the tests
    lines = subprocess.check_output(["make", "-n", "check"], cwd=repository, env=environment, text=True)
    paths = re.findall(r"(?<= )tests/\S+", lines)
    assert len(paths) > 20
    absent = [path for path in paths if not (repository / path).exists()]
    assert not absent, f"the Makefile names {', '.join(absent)}"


def names_defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_error_code_is_documented(repository: Path) -> None:
    assigned = re.compile(r"""\bcode(?:: [\w |]+)? ?= ?"([a-z_]+)\"""")
    texts = [
        file.read_text(encoding="utf-8") for top in ("common", "router") for file in (repository / top).rglob("*.py")
    ]
    codes = {
        code for text in texts if "RequestError" in text or "InvalidRequest" in text for code in assigned.findall(text)
    }
    assert len(codes) > 15
    check_named(codes, repository / "docs" / "reference" / "errors.md")


NAMES_OTHERS = {"CHANGELOG.md", "configuration.md", "migrate-from-vllm.md"}
OTHER_PROGRAMS = {"--enable-helm", "--set", "--api-versions", "--require-hashes", "--endpoint-type", "--model_args"}
"""Options of helm, Argo CD, pip, vLLM's bench and lm-eval."""


def test_options_that_pages_name_exist(repository: Path) -> None:
    known = {"--prefill-NAME", "--decode-NAME", "--help-all", *OTHER_PROGRAMS}
    for top in (*PACKAGES, "benchmarks", "helm"):
        for file in (repository / top).rglob("*.py"):
            known |= set(re.findall(r'"(--[a-z][\w-]*)', file.read_text(encoding="utf-8")))
    for cls in (*CONFIG_CLASSES, BenchConfig):
        for field in fields_of(cls):
            name = field.flag.removeprefix("--")
            known |= {field.flag, f"--no-{name}", f"--prefill-{name}", f"--decode-{name}"}
    wrong = []
    for page in pages(repository):
        if page.parent.name != "decisions" and page.name not in (
            "CHANGELOG.md",
            "configuration.md",
            "migrate-from-vllm.md",
        ):
            for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
                code = re.split(r"(?:^|\s)--\s", code)[0]  # the rest are arguments of vLLM
                if not code.startswith("--") and "diptych" not in code.split():
                    continue  # a command of another program
                wrong += [
                    f"{page.relative_to(repository)} names {option}"
                    for option in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", code)
                    if option not in known
                ]
    assert not wrong, "\n".join(wrong)


NIGHT = re.compile(r"^### ([^\n]+)\n(.+?)(?=^##)", re.MULTILINE | re.DOTALL)
PANEL = re.compile(r"Panel:\s\*(.+?)\*\s\((\w+)\)")
LEAST_LITERAL = 20
"""Characters of a quoted log line that must stand in the source. The rest may be names and numbers."""


@functools.cache
def texts_in(repository: Path) -> dict[str, tuple[str, ...]]:
    """Every string of our packages, and the parts of it that stand between its values."""
    found: dict[str, tuple[str, ...]] = {}
    for package in PACKAGES:
        for file in (repository / package).rglob("*.py"):
            source = re.sub(
                r'(?<=[^"])"\n\s*f?"(?=[^"])', "", file.read_text(encoding="utf-8")
            )  # implicit concatenation
            for text in re.findall(r'"((?:[^"\\\n]|\\.)+)"', source):
                found[text] = tuple(re.split(r"%[.\d]*[sdgf]|\{[^{}]*\}", text))
    return found


def has_parts(message: str, parts: tuple[str, ...]) -> bool:
    """Whether a message ends with a text, whose parts stand in their order."""
    at = 0
    for part in parts:
        if (found := message.find(part, at)) < 0:
            return False
        at = found + len(part)
    return sum(map(len, parts)) >= LEAST_LITERAL and message.endswith(parts[-1])


def is_logged(line: str, repository: Path) -> bool:
    """Whether a log line, `message  field=value ...`, ends with a text of the source, and has fields of the source."""
    message, _, fields = line.partition("  ")
    texts = texts_in(repository)
    if any(name not in texts for name in re.findall(r"(\w+)=", fields)):
        return False
    return message in texts or any(has_parts(message, parts) for parts in texts.values())


def test_each_night_has_a_panel_that_exists_a_line_that_is_logged_and_an_alert(repository: Path) -> None:
    page = (repository / "docs" / "guides" / "operate.md").read_text(encoding="utf-8")
    section = page[page.index("\n## Ten nights\n") : page.index("\n## Alerts\n") + 4]
    nights = NIGHT.findall(section)
    assert len(nights) == 10
    panels = []
    for title, text in nights:
        ((panel, dashboard),) = PANEL.findall(text)
        shown = json.loads((repository / "helm" / "dashboards" / f"{dashboard}.json").read_text(encoding="utf-8"))
        assert panel in [one["title"] for one in shown["panels"]], title
        panels.append(panel)
        (line,) = re.findall(r"^```text\n(.+)\n```$", text, re.MULTILINE)
        assert is_logged(line, repository), f"{title}: {line}"
        (alert,) = re.findall(r"\]\(#(diptych\w+)\)", text)
        assert f"### {alert}\n" in page.lower(), title
    assert len(set(panels)) == 10
    assert not is_logged("request a-1: ended because four of its workers died", repository)
