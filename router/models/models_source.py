"""Where the models of a router come from: its settings, or a file that may change while it runs."""

from __future__ import annotations

from common.config import RouterConfig
from router.access import FileWatch, content_of
from router.models.catalog import MODELS_FIELD
from router.models.entry import ModelTable
from router.models.models_file import MAX_FILE_BYTES, models_of, table_of
from router.siblings import AgreedFile, RouterPart

NAME = "models.toml"


class ModelsSource:
    """`table` is in force from the start; `watch` notices a changed file, None without a file.

    The processes of one router go by the content that they accepted, also one that is started again after the file has
    changed into something that they refuse. Raises ConfigError.
    """

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        self._path = config.models_file
        self._agreed = AgreedFile(part, NAME) if part is not None and self._path else None
        self.watch: FileWatch | None = None
        if not self._path:
            self.table = table_of(config)
            return
        content = self._agreed.read() if self._agreed is not None else None
        self._content = content_of(MODELS_FIELD, self._path, MAX_FILE_BYTES) if content is None else content
        self.watch = FileWatch([self._path], known=self._content)
        self.table = models_of(self._path, self._content)
        self.accept()

    def read(self) -> ModelTable:
        """What the file says now. Raises ConfigError."""
        self._content = content_of(MODELS_FIELD, self._path, MAX_FILE_BYTES)
        return models_of(self._path, self._content)

    def accept(self) -> None:
        """Put the content that was read last in force."""
        if self._agreed is not None:
            self._agreed.agree(self._content)
