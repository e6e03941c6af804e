"""Virtual environments of the clients: one for each, made on demand under build/clients and kept between runs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.model_files.model_cache import locked

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "clients"
VERSIONS = Path(__file__).with_name("versions.toml")
INSTALL_S = 1500.0
PROBE_S = 180.0
TAIL_CHARS = 600


class CannotInstall(Exception):
    """A client's packages cannot be had on this machine. The message says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """A row of versions.toml."""

    name: str
    requires: tuple[str, ...]
    python: tuple[int, ...] = (3, 11)
    before: tuple[int, ...] = (4,)
    without: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of the client's own package."""
        return self.requires[0].partition("==")[2]

    def runs_on(self, version: tuple[int, ...]) -> bool:
        return self.python <= version < self.before


def clients() -> dict[str, Client]:
    """All that versions.toml names."""
    rows = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))
    return {name: _client(name, **row) for name, row in rows.items()}


def _client(
    name: str,
    requires: list[str],
    python: str = "3.11",
    before: str = "4",
    without: tuple[str, ...] = (),
    npm: tuple[str, ...] = (),
) -> Client:
    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    return Client(name, tuple(requires), number(python), number(before), tuple(without), tuple(npm))


_refused: dict[Client, str] = {}
"""Why an environment could not be made: this process does not try again."""


def programs_of(name: str) -> Path:
    """The folder with the programs of a client's environment, which is made first where it is missing or out of date.

    Raises CannotInstall.
    """
    return made_at(clients()[name], FOLDER / name)


def made_at(client: Client, folder: Path) -> Path:
    """As `programs_of`, for a client that versions.toml does not name."""
    stamp, wanted = folder / ".complete", repr(client)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not stamp.exists() or stamp.read_text() != wanted:
            if client in _refused:
                raise CannotInstall(_refused[client])
            try:
                _make(client, folder)
            except CannotInstall as error:
                _refused[client] = str(error)
                raise
            stamp.write_text(wanted)
    return folder / "bin"


def _make(client: Client, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = _python_for(client)
    _call([python, "-m", "venv", str(folder)], PROBE_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _call([*pip, "install", "--no-compile", *client.requires], INSTALL_S)
    if client.npm:
        npm = [str(folder / "bin" / "npm"), "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit"]
        _call([*npm, "--no-fund", *client.npm], INSTALL_S)
    if client.without:
        _call([*pip, "uninstall", "--yes", *client.without], PROBE_S)


def _call(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"{' '.join(command)} took more than {timeout_s:g} s") from error
    if done.returncode != 0:
        raise CannotInstall(f"{' '.join(command)} failed: {(done.stdout + done.stderr).strip()[-TAIL_CHARS:]}")


def _python_for(client: Client) -> str:
    """A Python that the client runs on: the one that runs this, or another that is installed beside it."""
    for python in _pythons():
        version = _version_of(python)
        if version and client.runs_on(version):
            return python
    oldest, before = (".".join(map(str, bound)) for bound in (client.python, client.before))
    raise CannotInstall(f"{client.name} needs a Python from {oldest} on and below {before}, and none is installed")


def _pythons() -> Iterator[str]:
    yield sys.executable
    for minor in range(11, 15):
        yield from filter(None, [shutil.which(f"python3.{minor}")])
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from (str(path) for path in sorted(pyenv.glob("versions/3.*/bin/python"), reverse=True))


@functools.cache
def _version_of(python: str) -> tuple[int, ...]:
    """(3, 12) for example; () where the program does not run."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(part) for part in done.stdout.split()) if done.returncode == 0 else ()
