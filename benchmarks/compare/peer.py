"""The interface of an engine to measure: how to install it, and the processes that serve a model with it."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
NUM_PORTS = 5


class PeerError(Exception):
    """An engine cannot be prepared, started or used. The message says what to do, or ends with the engine's log."""


@dataclass(frozen=True)
class Process:
    """One process of an engine. `env` is added to this process's own; `ready` answers 200 once it serves."""

    name: str
    argv: tuple[str, ...]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A running engine: its processes in the order of their start, and the URL that takes completions.

    `model` is the name to request (empty: the first that the server lists). `text_only`: it takes neither token ids, so
    prompts are words of one token each, nor `ignore_eos`, so its model must name no end token.
    """

    url: str
    processes: tuple[Process, ...]
    model: str = ""
    text_only: bool = False


@dataclass(frozen=True)
class Site:
    """The place of a peer: its virtual environment, one model in several formats, cores and bounds."""

    env: Path
    weights: Mapping[str, Path]
    cores: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int

    @property
    def python(self) -> str:
        return str(self.env / "bin" / "python")

    @property
    def kv_gib(self) -> int:
        """Ample room for the KV of all sequences, for engines that need a size."""
        return 4


class Peer(ABC):
    """A serving engine in a virtual environment of its own.

    `variants` maps a way to run it to the format of the model that it reads (`weights.FORMATS`). `is_own`: it is
    Diptych in such an environment, compared with the others.
    """

    name: str
    variants: Mapping[str, str]
    packages: tuple[str, ...]
    distribution: str
    build_env: Mapping[str, str] = {}
    is_own = False

    @abstractmethod
    def launch(self, variant: str, site: Site, ports: Sequence[int]) -> Launch:
        """The processes of one variant on these NUM_PORTS free ports of loopback. Raises PeerError."""

    def steps(self, env: Path) -> list[tuple[str, ...]]:
        """The commands that install the peer into the folder `env`."""
        pip = (str(env / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
        return [(sys.executable, "-m", "venv", str(env)), (*pip, "install", *self.packages)]

    def prepare(self, env: Path) -> None:
        """Install the peer into `env`. Raises PeerError."""
        for step in self.steps(env):
            if subprocess.run(step, env={**os.environ, **self.build_env}, check=False).returncode != 0:
                raise PeerError(f"{self.name} was not installed: {' '.join(step)} failed")

    def version(self, env: Path) -> str:
        """The version of the installed distribution. Raises PeerError when there is none."""
        program = f"from importlib.metadata import version; print(version({self.distribution!r}))"
        python = env / "bin" / "python"
        if not python.exists():
            raise PeerError(f"no {self.name} in {env}: python -m benchmarks.compare --prepare {self.name} {env}")
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"{env} holds no {self.distribution}: prepare it again")
        return done.stdout.strip()


def core_list(cores: Sequence[int]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8)."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def url(port: int, path: str = "") -> str:
    return f"http://{HOST}:{port}{path}"
