"""The models that a router can load on demand: those of a models file, or all on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.config import RouterConfig
from common.model_files import LocalModel, local_models
from router.models.models_file import NAME, ModelEntry, ModelTable, read_models


class LocalTable:
    """Reads the current models. Models keep the names that they have had. `num_bytes` is the size of their weights."""

    def __init__(self, config: RouterConfig, models_dir: str) -> None:
        """Without a models file, the models are those of both caches and of `models_dir`, unless it is ""."""
        self._file, self._dir = config.models_file, models_dir
        self._names: dict[str, str] = {}
        self.num_bytes: dict[str, int] = {}
        self._files: dict[str, tuple[Path, ...]] = {}

    def read(self) -> ModelTable:
        """Return the models, each with a name. Raises ConfigError, and ModelError for a missing folder."""
        if self._file:
            table = read_models(self._file)
            return replace(table, models=tuple(replace(one, name=one.name or _last(one.model)) for one in table.models))
        found = local_models(Path(self._dir) if self._dir else None)
        for model in found:
            self._name(model)
        self.num_bytes = {model.name: model.num_bytes for model in found}
        self._files = {model.name: model.files for model in found}
        entries = (ModelEntry(one.name, self._names[one.name]) for one in found if one.name in self._names)
        return ModelTable(tuple(entries))

    def stamp(self, model: str) -> tuple[tuple[int, int], ...]:
        """Return the times and sizes of a model's files, which change when it is replaced; () if they are unknown."""
        files = self._files.get(model, ())
        try:
            if files and files[0].suffix != ".gguf":
                files = tuple(sorted(path for path in files[0].parent.iterdir() if path.is_file()))
            return tuple((stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in files))
        except OSError:
            return ()

    def _name(self, model: LocalModel) -> None:
        """Name a new model after the last part of its path, or after all of it if another model has that name."""
        if model.name in self._names:
            return
        taken = set(self._names.values())
        names = (_last(model.name), model.name)
        if name := next((one for one in names if one not in taken and NAME.fullmatch(one)), ""):
            self._names[model.name] = name


def _last(model: str) -> str:
    """Return the last part of a path, without the suffix of a file. Other names do not change."""
    path = Path(model)
    if not path.is_absolute():
        return model
    return path.stem if path.suffix == ".gguf" else path.name
