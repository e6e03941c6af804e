"""Finds the files of a model by name, and describes them for the router and workers. Does not load torch.

Descriptions are cached as JSON next to the converted tokenizer, with a stamp of every source file. A later start takes
milliseconds: it neither parses the vocabulary nor hashes the weights again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

import msgspec

from common.errors import ModelError
from common.model_files.builtin import BUILTIN_MODELS, TINY_MODELS, BuiltinModel, builtin_name
from common.model_files.files import DESCRIBED, TOOL_TEMPLATE, ModelFiles
from common.model_files.gguf.parts import gguf_name, gguf_parts, model_ggufs
from common.model_files.json_file import read_json
from common.model_files.library import HUB_GGUF, HUB_ID, local_folder, tiny_folder
from common.model_files.model_cache import cache_folder, locked, make_folder, write_atomically
from common.model_files.stamp import FileStamp, stamp_file, stamp_files
from common.model_files.weight_paths import weight_files
from common.observe import in_bytes

log = logging.getLogger(__name__)

DESCRIPTION_VERSION = 7  # increment when descriptions or tokenizer conversion change, to invalidate caches


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the cached description: `stamps` of the source files, and of the converted `tokenizer`."""

    version: int
    stamps: tuple[FileStamp, ...]
    tokenizer: FileStamp
    files: ModelFiles


def resolve_model(
    name: str, *, download: bool = True, progress: bool = True, weights: bool = True, supported: bool = True
) -> ModelFiles:
    """Find a model: a built-in name, a folder, a .gguf file or a Hugging Face id, tried in this order.

    A built-in name may also be written "smollm2:135m", with or without ":latest".

    An id is "org/name", or "org/name:Q4_K_M" to select GGUF files by quantisation. A missing built-in model is
    downloaded, with a progress bar on stderr, unless `download` is False. With `weights` False, the weights of a folder
    or Hugging Face model are neither downloaded nor read, as for a router. With `supported` False, a folder or Hugging
    Face model may have an architecture or weight format that only another engine supports.

    Raises ModelError, with the remedy, if the model is missing, damaged or not supported.
    """
    name = builtin_name(name)
    if name in TINY_MODELS:
        return _resolve_tiny(name, weights=weights)
    if name in BUILTIN_MODELS:
        return _resolve_builtin(BUILTIN_MODELS[name], download=download, progress=progress)
    path = Path(name).expanduser()
    if name and path.is_dir():
        found = path.resolve()
        return _resolve_folder(found, found.name, progress=progress, weights=weights, supported=supported)
    if name and path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: use a .gguf file, or a folder with a config.json")
        return _resolve_gguf(path.absolute(), progress=progress)
    if (match := HUB_GGUF.fullmatch(name)) is not None:
        from common.model_files.hub import hub_gguf

        return _resolve_gguf(hub_gguf(*match.groups(), download=download), name, progress=progress)
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        from common.model_files.hub import hub_folder

        if weights:  # refuse an unsupported model before downloading its weights
            text = hub_folder(name, download=download, weights=False)
            _resolve_folder(text, name, progress=progress, weights=False, supported=supported)
        folder = hub_folder(name, download=download, weights=weights, supported=supported)
        return _resolve_folder(folder, name, progress=progress, weights=weights, supported=supported)
    raise ModelError(_unknown(name))


def _unknown(name: str) -> str:
    known = [*BUILTIN_MODELS, *TINY_MODELS]
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"unknown model {name!r}: no such file or folder, and no built-in model ({', '.join(known)}).{hint} "
        "For a Hugging Face model use org/name, or org/name:Q4_K_M for GGUF files"
    )


def _resolve_tiny(name: str, *, weights: bool) -> ModelFiles:
    """Build the tiny model on first use."""
    folder = tiny_folder(name)
    if not (folder / ".complete").exists():
        with locked(cache_folder() / "models" / f".{name}.lock"):
            from common.model_files.tiny import make_tiny_model  # loads numpy, which is needed only here

            make_tiny_model(folder, architecture="gemma3" if TINY_MODELS[name] == "gemma3" else "llama")
            write_atomically(folder / ".complete", b"")
    return _resolve_folder(folder, name, progress=False, weights=weights)


def _resolve_builtin(model: BuiltinModel, *, download: bool, progress: bool) -> ModelFiles:
    from common.model_files.download import fetch_model, model_folder, verify_model

    folder = model_folder(model)
    path = folder / model.file
    if not path.exists():
        if not download:
            raise ModelError(f"{model.name} is not in {folder}. Download it: diptych pull {model.name}")
        log.info("model %s: downloading %s", model.name, in_bytes(model.num_bytes))
        fetch_model(model, progress=progress)

    def describe() -> ModelFiles:
        from common.model_files.describe import describe_gguf

        verify_model(model, path)
        return describe_gguf([path], model.name, folder, progress=progress)

    return _described(folder, [path], describe)


def _resolve_gguf(path: Path, model_id: str = "", *, progress: bool) -> ModelFiles:
    """Resolve a .gguf file together with all parts of its model."""
    parts = gguf_parts(path)
    folder = local_folder(parts[0])

    def describe() -> ModelFiles:
        from common.model_files.describe import describe_gguf

        return describe_gguf(parts, gguf_name(path), folder, progress=progress)

    return _named(_described(folder, parts, describe), model_id or gguf_name(path))


def _resolve_folder(
    folder: Path, model_id: str, *, progress: bool, weights: bool, supported: bool = True
) -> ModelFiles:
    """Resolve a Hugging Face folder, or a folder with the .gguf files of one model."""
    try:
        found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    ggufs = model_ggufs(found.values())
    if "config.json" not in found and len(set(map(gguf_name, ggufs))) == 1:
        return _resolve_gguf(ggufs[0], progress=progress)
    if "config.json" not in found and ggufs:
        raise ModelError(f"{folder} has {len(ggufs)} .gguf files: select one, such as {ggufs[0]}")
    read_json(folder / "config.json", required=True)
    sources = [found[name] for name in DESCRIBED if name in found]
    sources += [path] if (path := folder / TOOL_TEMPLATE).is_file() else []
    sources += weight_files(folder) if weights else []

    def describe() -> ModelFiles:
        from common.model_files.describe import describe_folder

        return describe_folder(folder, model_id, progress=progress, weights=weights, supported=supported)

    files = _described(local_folder(folder), sources, describe, "files.json" if weights else "text.json")
    if supported and files.unsupported:  # described for another engine
        raise ModelError(files.unsupported)
    return _named(files, model_id)


def _named(files: ModelFiles, model_id: str) -> ModelFiles:
    """Return the model under the requested name."""
    return files if files.model_id == model_id else msgspec.structs.replace(files, model_id=model_id)


def _described(
    folder: Path, sources: Sequence[Path], describe: Callable[[], ModelFiles], sidecar_name: str = "files.json"
) -> ModelFiles:
    """Return the cached description in `folder` if no source has changed, or create a new one under a lock."""
    sidecar = folder / sidecar_name
    stamps = stamp_files(sources)
    files = _read_description(sidecar, stamps)
    if files is None:
        with locked(make_folder(folder) / ".describe.lock"):
            files = _read_description(sidecar, stamps)
            if files is None:
                size = in_bytes(sum(stamp.num_bytes for stamp in stamps))
                place = sources[0] if sources[0].suffix == ".gguf" else sources[0].parent
                log.info("model %s: new or changed, reading its vocabulary and hashing %s", place, size)
                files = describe()
                _write_description(sidecar, stamps, files)
    return files


def _write_description(sidecar: Path, stamps: tuple[FileStamp, ...], files: ModelFiles) -> None:
    description = _Description(
        version=DESCRIPTION_VERSION, stamps=stamps, tokenizer=stamp_file(files.tokenizer), files=files
    )
    write_atomically(sidecar, msgspec.json.encode(description, enc_hook=str))


def _read_description(sidecar: Path, stamps: tuple[FileStamp, ...]) -> ModelFiles | None:
    try:
        found = msgspec.json.decode(sidecar.read_bytes(), type=_Description, dec_hook=lambda kind, value: kind(value))
    except (OSError, msgspec.MsgspecError):  # missing, unreadable or of another version
        return None
    if found.version != DESCRIPTION_VERSION or found.stamps != stamps or not found.files.tokenizer.exists():
        return None
    return found.files if found.tokenizer == stamp_file(found.files.tokenizer) else None
