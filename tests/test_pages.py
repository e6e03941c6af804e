"""The documentation's examples: every printed command works, prints what its page shows, and every snippet parses.

Fences in README.md and docs/ (decisions excepted):

    ```bash      commands; a page's fences run in order in one shell, in the root of the repository
    ```console   `$ command` followed by its output, where `...` stands for any text
    ```python    a program; it runs while the page's server runs
    ```toml, yaml, json   parsed

A command that starts `diptych serve` or `make serve` runs until the next one, or until the page ends.
`<!-- not run: REASON -->` before a fence keeps it from being run; options of `diptych` are checked all the same.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RankHostConfig, RouterConfig, ServeConfig
from common.config.field import fields_of

from .rig import Program

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"),
]
FENCE = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LANGUAGES = {"bash", "console", "python", "toml", "yaml", "json", "text", "ini", "promql", "http"}
START_S, COMMAND_S = 240.0, 300.0
SETTINGS = {
    "serve": ServeConfig,
    "router": RouterConfig,
    "prefill-worker": PrefillWorkerConfig,
    "decode-worker": DecodeWorkerConfig,
    "rank-host": RankHostConfig,
}


@dataclass(frozen=True)
class Snippet:
    """A fence of a page. `reason`: why it is not run."""

    language: str
    text: str
    line: int
    reason: str

    def commands(self) -> list[tuple[str, str]]:
        """Each command of a bash or console fence with the output that the page shows."""
        found: list[list[str]] = []
        joined = self.text.replace("\\\n", "\\\0")  # a command may span lines
        for line in joined.splitlines():
            command = line.removeprefix("$ ")
            if self.language == "console" and command == line:
                found[-1][1] += line + "\n"
            elif command.strip() and not command.startswith("#"):
                found.append([command.replace("\\\0", " "), ""])
        return [(command, output) for command, output in found]


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(match["language"], match["text"], text[: match.start()].count("\n") + 1, match["reason"] or "")
        for match in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_parse(page: Path) -> None:
    parsers: dict[str, Callable[[str], object]] = {
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": lambda text: list(yaml.safe_load_all(text)),
        "python": lambda text: compile(text, name_of(page), "exec"),
    }
    for snippet in snippets(page):
        where = f"{name_of(page)}:{snippet.line}"
        assert snippet.language in LANGUAGES, f"{where}: name the language of the fence: {', '.join(sorted(LANGUAGES))}"
        try:
            parsers.get(snippet.language, str)(snippet.text)
        except (ValueError, SyntaxError, yaml.YAMLError) as error:
            pytest.fail(f"{where}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_of_commands_exist(page: Path) -> None:
    """Also of commands that a test cannot run, such as those that need a GPU or a cluster."""
    for snippet in snippets(page):
        if snippet.language not in ("bash", "console"):
            continue
        for command, _ in snippet.commands():
            words = shlex.split(command, comments=True)
            if "diptych" not in words or (role := words[words.index("diptych") + 1 :][:1]) == []:
                continue
            if (settings := SETTINGS.get(role[0])) is None:
                continue
            known = {field.flag for field in fields_of(settings)}
            if role[0] == "serve":
                for pool, cls in (("prefill", PrefillWorkerConfig), ("decode", DecodeWorkerConfig)):
                    known |= {field.flag for field in fields_of(cls)}
                    known |= {f"--{pool}-{field.flag.removeprefix('--')}" for field in fields_of(cls)}
                known |= {field.flag for field in fields_of(RouterConfig)}
            for word in words:
                flag = word.partition("=")[0]
                if flag.startswith("--") and flag not in ("--help", "--help-all", "--"):
                    assert flag in known or f"--{flag.removeprefix('--no-')}" in known, (
                        f"{name_of(page)}:{snippet.line}: `diptych {role[0]}` has no {flag}"
                    )


@pytest.fixture
def page_server(tmp_path: Path) -> Iterator[PageServer]:
    server = PageServer(tmp_path)
    yield server
    server.stop()


class PageServer:
    """The server that a page starts, on a free port in place of 8000."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self._folder, self._num_started = folder, 0
        self._program: Program | None = None
        scripts = folder / "bin"
        scripts.mkdir()
        diptych = scripts / "diptych"
        diptych.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m common.cli "$@"\n')
        diptych.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DIPTYCH_PORT": str(self.port),
            "COLUMNS": "170",
            "NO_COLOR": "1",
        }

    def here(self, text: str) -> str:
        """Replace the default port by this server's, also where a command leaves it out."""
        address = f"127.0.0.1:{self.port}"
        text = re.sub(r"diptych bench (?!.*--url)", f"diptych bench --url http://{address} ", text)
        text = text.replace("--port 8000", f"--port {self.port}")
        return text.replace("127.0.0.1:8000", address).replace("localhost:8000", address)

    def start(self, command: str) -> None:
        """Run a command that serves, and wait until it is ready."""
        self.stop()
        self._num_started += 1
        self._program = Program("serve", self._folder / f"serve-{self._num_started}.log", group=True)
        shell = self.here(command).replace("make serve", f"diptych serve {os.environ.get('ARGS', '')}")
        self._program.launch(["bash", "-c", f"exec {shell}"], cwd=ROOT, env=self.environment)
        self._program.wait_for_line("OpenAI base URL", START_S)

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program = None

    def run(self, argv: list[str]) -> str:
        """The output of a command that ends. Fails unless it succeeds."""
        done = subprocess.run(
            argv, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{shlex.join(argv)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def shows(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows; `...` stands for any text, and white space does not count."""
    parts = [re.escape(" ".join(part.split())).replace(r"\ ", r"\s+") for part in shown.split("...")]
    return re.search(r"[\s\S]*".join(parts), printed) is not None


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if any(each.language in ("bash", "console", "python") and not each.reason for each in snippets(page))
    ],
    ids=name_of,
)
def test_commands_work_and_print_what_the_page_shows(page: Path, page_server: PageServer) -> None:
    for snippet in snippets(page):
        if snippet.reason:
            continue
        if snippet.language == "python":
            page_server.run([sys.executable, "-P", "-c", page_server.here(snippet.text)])
        if snippet.language not in ("bash", "console"):
            continue
        for command, shown in snippet.commands():
            if command == "source .venv/bin/activate":  # the tests' environment is on PATH
                continue
            if re.match(r"(diptych|make) serve\b(?!.*--help)", command):
                page_server.start(command)
                continue
            printed = page_server.run(["bash", "-c", page_server.here(command)])
            assert shows(page_server.here(shown), printed), (
                f"{name_of(page)}:{snippet.line}: `{command}` printed\n{printed}"
            )


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(page.name for page in folder.glob("0*.md"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds(tmp_path: Path) -> None:
    """In strict mode: a link to a page or a heading that does not exist is an error."""
    pytest.importorskip("mkdocs")
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "quickstart.html").is_file()
