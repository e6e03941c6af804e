"""The file of `--lora-file`: TOML, one `[[adapter]]` table for each LoRA adapter that the workers are to hold.

[[adapter]]
name = "sql"                   # as clients call it
path = "/adapters/sql"         # the folder, as workers see it
model = "small"                # of several models the one that it adapts; the default one if it is left out
revision = "2"                 # any text: with another one workers read the folder again
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from common.config import ADAPTER_NAME
from common.errors import ConfigError
from common.wire import MAX_ADAPTERS, MAX_PATH
from router.access import FileWatch, content_of, table_of
from router.models.catalog import Catalog
from router.siblings import AgreedFile, RouterPart

LORA_FIELD = "lora_file"
MAX_LIST_BYTES = 1024 * 1024
"""As many adapters as a worker tells of, with paths of any length, three times over."""
ShortText = Annotated[str, Meta(max_length=256)]
"""The name of a model, or a revision."""
AGREED_NAME = "adapters.toml"


class AdapterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file; "" for what is left out."""

    name: Annotated[str, Meta(pattern=rf"^{ADAPTER_NAME}\Z")]
    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
    model: ShortText = ""
    revision: ShortText = ""


class _AdaptersFile(msgspec.Struct, forbid_unknown_fields=True):
    adapter: Annotated[list[AdapterEntry], Meta(max_length=MAX_ADAPTERS)] = []


def adapters_of(path: str, data: bytes) -> tuple[AdapterEntry, ...]:
    """The adapters that the content of a file names. Raises ConfigError that names the table and the field."""
    table = table_of(LORA_FIELD, path, data, MAX_LIST_BYTES)
    try:
        entries = msgspec.convert(table, _AdaptersFile).adapter
    except msgspec.ValidationError as error:
        raise ConfigError(LORA_FIELD, path, f"[[adapter]] tables with name, path, model, revision: {error}") from error
    twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise ConfigError(LORA_FIELD, path, f"each name once, not {twice[0]!r} again")
    return tuple(entries)


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
