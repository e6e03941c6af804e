"""The adapters that an operator's file names, now and whenever it has changed."""

from __future__ import annotations

import msgspec

from common.errors import ConfigError
from router.access import FileWatch, content_of
from router.models.adapters_file import LORA_FIELD, MAX_LIST_BYTES, AdapterEntry, adapters_of
from router.models.catalog import Catalog
from router.siblings import AgreedFile, RouterPart

AGREED_NAME = "adapters.toml"


class AdaptersSource:
    """`entries` are in force from the start, each with its model; `watch` notices a changed file. Raises ConfigError.

    Of a router's processes one follows the file. When it is started again it goes by the content that was accepted
    last, also where the file has changed into something that is refused.
    """

    def __init__(self, path: str, catalog: Catalog, part: RouterPart | None = None) -> None:
        self._path = path
        self._agreed = AgreedFile(part, AGREED_NAME) if part is not None else None
        known = self._agreed.read() if self._agreed is not None else None
        content = content_of(LORA_FIELD, path, MAX_LIST_BYTES) if known is None else known
        self.watch = FileWatch([path], known=content)
        self.entries = self._accept(content, catalog)

    def read(self, catalog: Catalog) -> tuple[AdapterEntry, ...]:
        """Put in force what the file says now, where the models have these names. Raises ConfigError."""
        self.entries = self._accept(content_of(LORA_FIELD, self._path, MAX_LIST_BYTES), catalog)
        return self.entries

    def _accept(self, content: bytes, catalog: Catalog) -> tuple[AdapterEntry, ...]:
        entries = tuple(self._with_model(entry, catalog) for entry in adapters_of(self._path, content))
        if self._agreed is not None:
            self._agreed.agree(content)
        return entries

    def _with_model(self, entry: AdapterEntry, catalog: Catalog) -> AdapterEntry:
        """An entry that says which model it adapts, by the name under which the router serves it."""
        if catalog.has(entry.name):
            raise ConfigError(LORA_FIELD, self._path, f"names that no model, alias or split has, not {entry.name!r}")
        if entry.model and not catalog.is_model(entry.model):
            known = ", ".join(catalog.models)
            raise ConfigError(
                LORA_FIELD, self._path, f"adapter {entry.name!r}, model: one of {known}, not {entry.model!r}"
            )
        model = catalog.targets(entry.model)[0] if entry.model else catalog.models[0]
        return msgspec.structs.replace(entry, model=model)
