"""Models on this machine: in Diptych's cache, in Hugging Face's cache, and in a folder of models.

A process that serves a model holds a shared lock on the model's usage file, `used/HASH` in the cache. Its modification
time is when the model was last loaded. The lock ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import IO, Literal

import xxhash

from common.errors import ModelError
from common.model_files.builtin import BUILTIN_MODELS, TINY_MODELS, builtin_name
from common.model_files.files import DESCRIBED, TOOL_TEMPLATE
from common.model_files.gguf.parts import PART, gguf_name, model_ggufs
from common.model_files.model_cache import cache_folder, make_folder
from common.model_files.weight_paths import INDEX, SUFFIX, weight_files

Place = Literal["cache", "hub", "folder"]
QUANTISATION = re.compile(r"(?i)(?:.*[-._])?((?:IQ|TQ|Q)\d\w*|BF16|F16|F32|MXFP4\w*)")
"""Quantisation at the end of the name of a GGUF file."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern}):(\w[\w.-]*)")
HELD: dict[Path, IO[bytes]] = {}
"""Usage files whose locks this process holds until it ends."""
HOLD_S, CHECK_S = 10.0, 0.05
"""Maximum wait for a lock, in seconds: to hold a model, and to find that no other process holds it.

Other processes that check lock the file for an instant, and one that deletes the model until it is gone.
"""
OWN_FILES = (
    *(*DESCRIBED, TOOL_TEMPLATE, INDEX, "modules.json", "preprocessor_config.json", "processor_config.json"),
    *("added_tokens.json", "merges.txt", "tokenizer.model", "vocab.json", "vocab.txt"),
)
"""Files other than weights that are deleted with a model of a models folder, relative to the model's folder."""
NEVER = (0.0, 0.0)
"""Times of the usage file of a model that was never loaded."""


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    `name` is a value of `--model`. `files` are its weights, of `num_bytes`. `owned` are the paths that are deleted with
    it, in order: folders of a cache with their content, those of a models folder only when they are empty. `used` is
    when Diptych last loaded it, in seconds since the epoch; 0: never.
    """

    name: str
    place: Place
    format: Literal["gguf", "safetensors"]
    files: tuple[Path, ...]
    owned: tuple[Path, ...]
    num_bytes: int
    used: float

    @property
    def in_use(self) -> bool:
        """Whether a process on this machine serves the model."""
        return is_in_use(self.files[0])

    @property
    def owned_bytes(self) -> int:
        """Size of what is deleted with the model. Links count as 0, because their content is another path."""
        inside = (path.rglob("*") for path in self.owned if self.place != "folder" and path.is_dir())
        paths = (*self.owned, *chain.from_iterable(inside))
        return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def local_models(models_dir: Path | None = None) -> list[LocalModel]:
    """Return the models of both caches and of `models_dir`, by place and name. Raises ModelError for a missing folder.

    In `models_dir`, a model is a folder with a config.json and weights or with one GGUF model, or else a GGUF file.
    """
    if models_dir is not None and not models_dir.is_dir():
        raise ModelError(f"the models folder {models_dir} does not exist")
    places = (_cached(), _on_hub(), _in_folder(models_dir) if models_dir is not None else ())
    return [model for place in places for model in sorted(place, key=lambda model: model.name)]


def find_model(name: str, models: Sequence[LocalModel]) -> LocalModel:
    """Return the model called `name`, or the only one whose name ends with it. Raises ModelError.

    The name of a .gguf file does not have to include its suffix and part number.
    """
    wanted = builtin_name(name)
    ends = [model for model in models if wanted.lower() in _last_parts(model.name.lower())]
    paths = {str(Path(name).expanduser().absolute()), str(Path(name).expanduser().resolve())}
    found = [model for model in models if model.name == wanted or model.name in paths] or ends
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{name!r} is ambiguous: use one of {', '.join(model.name for model in found)}")
    near = get_close_matches(name, [model.name for model in models], n=1)
    hint = f" Did you mean {near[0]}?" if near else " diptych ls lists the models."
    raise ModelError(f"the model {name!r} is not on this machine.{hint}")


def _last_parts(name: str) -> set[str]:
    last = name.rpartition("/")[2]
    return {last, gguf_name(Path(last))} if last.endswith(".gguf") else {last}


def remove_model(model: LocalModel) -> int:
    """Delete a model of a cache or a models folder, and return the bytes freed.

    Other files in a models folder are kept, and so is the content that a link in it refers to.

    Raises ModelError if a process on this machine serves it, or a file cannot be deleted.
    """
    first = model.files[0]
    conversions = {local_folder(path) for path in (first, first.parent, first.parent.resolve())}  # of a file or folder
    _mark_unused(usage := usage_file(first))
    with _unused(first) as is_unused:
        if not is_unused:
            raise ModelError(f"{model.name} is used by a running service: stop it first")
        try:
            num_bytes = model.owned_bytes
            for path in model.owned:
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                elif model.place != "folder":
                    shutil.rmtree(path)
                else:
                    with contextlib.suppress(OSError):  # it has other files
                        path.rmdir()
        except OSError as error:
            raise ModelError(f"{model.name} cannot be deleted: {error.filename}: {error.strerror}") from error
        for path in conversions:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.utime(usage, NEVER)  # the file stays, because a process may wait for its lock
    return num_bytes


def local_folder(path: Path) -> Path:
    """Return the folder for conversions of a file or folder outside of the cache."""
    return cache_folder() / "local" / f"{path.stem}-{xxhash.xxh3_64(str(path).encode()).hexdigest()}"


def usage_file(weights: Path) -> Path:
    """Return the usage file of the model whose first weight file is `weights`."""
    folder = weights.parent.resolve()
    key = folder / weights.name if weights.suffix == ".gguf" else folder
    return cache_folder() / "used" / xxhash.xxh3_64(str(key).encode()).hexdigest()


def hold_model(weights: Sequence[Path]) -> None:
    """Record that this process uses a model, until it ends or calls `release_models`. No effect in a read-only cache.

    Waits while the model is being deleted, for at most `HOLD_S`.
    """
    for path in weights[:1]:
        with contextlib.suppress(OSError, ModelError):
            usage = usage_file(path)
            make_folder(usage.parent)
            if usage not in HELD:
                HELD[usage] = usage.open("ab")
            _lock(HELD[usage], fcntl.LOCK_SH, HOLD_S)
            os.utime(usage)


def release_models(kept: Iterable[Path]) -> None:
    """Release the models that this process holds, except those whose first weight file is in `kept`."""
    usages = set(map(usage_file, kept))
    for usage in HELD.keys() - usages:
        HELD.pop(usage).close()


def is_in_use(weights: Path) -> bool:
    """Whether a process of this machine holds the model whose first weight file is `weights`."""
    with _unused(weights) as is_unused:
        return not is_unused


def _mark_unused(usage: Path) -> None:
    """Create the usage file of a model that was never loaded, so that it can be locked."""
    with contextlib.suppress(OSError, ModelError):
        make_folder(usage.parent)
        usage.touch(exist_ok=False)
        os.utime(usage, NEVER)


@contextlib.contextmanager
def _unused(weights: Path) -> Iterator[bool]:
    """Yield whether no process holds the model. If so, none can hold it before the end."""
    try:
        file = usage_file(weights).open("rb")
    except OSError:  # never loaded, or in a cache of another user
        yield True
        return
    with file:
        yield _lock(file, fcntl.LOCK_EX, CHECK_S)


def _lock(file: IO[bytes], kind: int, patience_s: float) -> bool:
    """Lock a usage file. Returns False if it stays locked by another process for longer than `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        except OSError:  # no locks on this file system
            return True
        else:
            return True


def _model(name: str, place: Place, files: Sequence[Path], owned: Iterable[Path]) -> LocalModel:
    kind: Literal["gguf", "safetensors"] = "gguf" if files[0].suffix == ".gguf" else "safetensors"
    try:
        used = usage_file(files[0]).stat().st_mtime
    except OSError:
        used = 0.0
    num_bytes = sum(path.stat().st_size for path in files if path.exists())
    return LocalModel(name, place, kind, tuple(files), tuple(owned), num_bytes, used)


def _weights(folder: Path) -> Iterator[list[Path]]:
    """Yield the weight files of each model: those next to a config.json in the folder, and GGUF files at any depth."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return
    if (folder / "config.json").is_file() and (shards := _shards(folder)):
        yield shards
    yield from _by_model(sorted(path for path in model_ggufs(folder.rglob("*")) if path.is_file()))


def _shards(folder: Path) -> list[Path]:
    """Return the .safetensors weights of a folder, or all such files if the model is incomplete or ambiguous."""
    try:
        return list(weight_files(folder))
    except ModelError:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and path.is_file())


def _by_model(ggufs: Iterable[Path]) -> Iterator[list[Path]]:
    """Group GGUF files by the model that they are, or are parts of, in their order."""
    groups: dict[tuple[Path, int], list[Path]] = {}
    for path in ggufs:
        part = PART.match(path.name)
        groups.setdefault((path.with_name(gguf_name(path)), int(part[2]) if part else 0), []).append(path)
    yield from groups.values()


def tiny_folder(name: str) -> Path:
    """Return the folder of a tiny model. It is named after a hash of the generator, so changes rebuild the model."""
    recipe = xxhash.xxh3_64(Path(__file__).with_name("tiny.py").read_bytes()).hexdigest()[:8]
    return cache_folder() / "models" / f"{name}-{recipe}"


def _cached() -> Iterator[LocalModel]:
    tiny = {tiny_folder(name).name: name for name in TINY_MODELS}
    for folder in _folders(cache_folder() / "models"):
        is_builtin = folder.name in BUILTIN_MODELS
        for files in _weights(folder):
            yield _model(tiny.get(folder.name, folder.name if is_builtin else str(folder)), "cache", files, [folder])


def hub_cache() -> Path:
    """Return the folder of the Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def download_place(name: str) -> tuple[Path, int] | None:
    """Return the folder that a download of a model fills, and its bytes (0: unknown). None: not a downloadable model.

    Only the syntax of a Hugging Face id is checked.
    """
    if name in BUILTIN_MODELS:
        return cache_folder() / "models" / name, sum(part.num_bytes for part in BUILTIN_MODELS[name].parts)
    if name in TINY_MODELS:
        return tiny_folder(name), 0
    found = HUB_ID.fullmatch(name) or HUB_GGUF.fullmatch(name)
    if found is None:
        return None
    return hub_cache() / f"models--{name.partition(':')[0].replace('/', '--')}" / "blobs", 0


def _on_hub() -> Iterator[LocalModel]:
    """Find models in the layout of `huggingface_hub`: models--ORG--NAME with blobs/, refs/main and snapshots/COMMIT."""
    for folder in _folders(hub_cache()):
        kind, *names = folder.name.split("--", 2)
        snapshot = _snapshot(folder)
        if kind != "models" or len(names) != 2 or snapshot is None:
            continue
        models = list(_weights(snapshot))
        kinds = Counter(_quantisation(files[0]).upper() for files in models)
        for files in models:
            name, quantisation = "/".join(names), _quantisation(files[0])
            if files[0].suffix == ".gguf":
                is_unique = bool(quantisation) and kinds[quantisation.upper()] == 1
                name = f"{name}:{quantisation}" if is_unique else str(files[0])
            contents = [file.resolve() for file in files if file.is_symlink()]
            yield _model(name, "hub", files, [folder] if len(models) == 1 else [*files, *contents])


def _quantisation(weights: Path) -> str:
    """Return the quantisation in the name of a GGUF file, or ""."""
    found = QUANTISATION.fullmatch(gguf_name(weights)) if weights.suffix == ".gguf" else None
    return found[1] if found is not None else ""


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of the main branch, or else the newest one."""
    with contextlib.suppress(OSError):
        main = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        if main.is_dir():
            return main
    return max(_folders(folder / "snapshots"), key=lambda path: path.stat().st_mtime, default=None)


def _in_folder(folder: Path) -> Iterator[LocalModel]:
    paths = sorted(folder.absolute().iterdir())
    for files in _by_model(path for path in model_ggufs(paths) if path.is_file()):
        yield _model(str(files[0]), "folder", files, files)
    for path in paths:
        if path.is_dir():
            models = list(_weights(path))
            is_alone = len(models) == 1 and not (path / "config.json").is_file()
            for files in models:
                is_folder = files[0].suffix == SUFFIX or (is_alone and files[0].parent == path)
                yield _model(str(path if is_folder else files[0]), "folder", files, _owned(path, files, is_folder))


def _owned(folder: Path, files: Sequence[Path], is_folder: bool) -> list[Path]:
    """Return what a model in or below a folder of the models folder owns. `is_folder`: it is named after the folder."""
    if is_folder and folder.is_symlink():
        return [folder]
    others = [folder / name for name in OWN_FILES] if is_folder else []
    if is_folder and files[0].suffix == ".gguf":
        others += sorted(folder.glob("*mmproj*.gguf"))
    inner = files[0].parent.relative_to(folder)
    folders = [(folder / TOOL_TEMPLATE).parent, *(folder / one for one in (inner, *inner.parents))]
    found = [path for path in (*files, *others) if path.is_file()]
    return [*found, *(path for path in folders if path.is_dir() and not path.is_symlink())]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
