"""A running service, and clients that ask it from programs and environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack

from ..rig import System, make_stack, samples
from .environment import CannotInstall, programs_of
from .scripted_model import make_scripted_model

PROBE_S = 30.0
CLIENT_S = 600.0
"""Clients import for long where others take the cores."""
PROGRAMS = Path(__file__).with_name("programs")


@dataclass
class Service:
    """A prefill worker, a decode worker and a router; every prompt goes through both workers."""

    stack: Stack

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def model(self) -> str:
        """The name that clients use."""
        return str(httpx.get(f"{self.url}/v1/models", trust_env=False, timeout=PROBE_S).json()["data"][0]["id"])

    def answered(self) -> float:
        """Requests that ended well, as the router counts them."""
        return sum(samples(self.stack.router, "vllm:request_success"))

    def check(self) -> None:
        """No request failed by the service's fault, nothing was logged as a bug, and no block is still owned."""
        router = self.stack.router
        assert not sum(samples(router, "diptych_http_requests", 'status="5')), router.log_tail()
        for process in self.stack.everything:
            assert process.alive and "Traceback" not in process.log.read_text(), process.log_tail()
        System(self.stack).settle()


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[Callable[[str], Service]]:
    """Starts the service for a model, or gives back the module's running one; at most one runs at a time."""
    running: dict[str, Service] = {}

    def stop_all() -> None:
        for service in running.values():
            service.stack.stop()
        running.clear()

    def start(model: str) -> Service:
        if model not in running:
            stop_all()
            folder, flags = tmp_path_factory.mktemp("stack"), ("--local-prefill-threshold", "0")
            stack = make_stack(folder, model=model, worker_flags=("--kv-memory-gib", "0.3"), router_flags=flags)
            stack.start()
            running[model] = Service(stack)
        return running[model]

    yield start
    stop_all()


@pytest.fixture
def serve(services: Callable[[str], Service]) -> Iterator[Callable[[str], Service]]:
    """Like `services`; after the test each service that it used must be sound and empty."""
    used: list[Service] = []

    def start(model: str) -> Service:
        used.append(services(model))
        return used[-1]

    yield start
    for service in used:
        service.check()


@pytest.fixture
def scripted(serve: Callable[[str], Service], scripted_folder: Path) -> Service:
    """The service in front of the model of scripted_model.py."""
    return serve(str(scripted_folder))


@dataclass(frozen=True, slots=True)
class Client:
    """The programs of one client's environment."""

    programs: Path
    home: Path
    settings: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, timeout_s: float = CLIENT_S, said: str = "") -> str:
        """What a program prints, with `said` as its input. Fails with all that it printed when it fails."""
        name, *arguments = command
        done = subprocess.run(
            [str(self.programs / name), *arguments],
            input=said, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=self.home,
            env=self._environment(),
        )  # fmt: skip
        printed = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{printed}"
        return done.stdout

    def ask(self, program: str, url: str, model: str, *arguments: str, timeout_s: float = CLIENT_S) -> Any:
        """What a program of the folder `programs` found: the JSON of the last line that it prints."""
        runs = "node" if program.endswith(".cjs") else "python"
        printed = self.run(runs, str(PROGRAMS / program), url, model, *arguments, timeout_s=timeout_s)
        return json.loads(printed.strip().splitlines()[-1])

    def _environment(self) -> dict[str, str]:
        """Nothing of the user's settings, no download, no report to anyone."""
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SSL_CERT_FILE")}
        return {
            **kept, "HOME": str(self.home), "PATH": f"{self.programs}:{kept.get('PATH', '')}", "OPENAI_API_KEY": "none",
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1",
            "HF_HOME": str(self.home / "hf"), "NO_PROXY": "*", "NODE_PATH": str(self.programs.parent / "node_modules"),
            **self.settings,
        }  # fmt: skip


@pytest.fixture
def client_of(tmp_path: Path) -> Callable[..., Client]:
    """A client by its name in versions.toml, with more variables of its environment; skips where it cannot be had."""

    def get(name: str, **settings: str) -> Client:
        try:
            programs = programs_of(name)
        except CannotInstall as error:
            pytest.skip(f"{name}: {error}")
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        return Client(programs, home, settings)

    return get
