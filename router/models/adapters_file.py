"""Format of `--lora-file`: TOML with one `[[adapter]]` table per LoRA adapter that workers load.

[[adapter]]
name = "sql"                   # name for clients
path = "/adapters/sql"         # folder, as seen by workers
model = "small"                # model to adapt; default: the default model
revision = "2"                 # any text; workers reload the folder when it changes
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
"""Maximum size of the file, about three times what the maximum number of adapters needs."""
ShortText = Annotated[str, Meta(max_length=256)]
"""Name of a model, or a revision."""
AGREED_NAME = "adapters.toml"


class AdapterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file. Omitted fields are ""."""

    name: Annotated[str, Meta(pattern=rf"^{ADAPTER_NAME}\Z")]
    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
    model: ShortText = ""
    revision: ShortText = ""


class _AdaptersFile(msgspec.Struct, forbid_unknown_fields=True):
    adapter: Annotated[list[AdapterEntry], Meta(max_length=MAX_ADAPTERS)] = []


def adapters_of(path: str, data: bytes) -> tuple[AdapterEntry, ...]:
    """Parse the content of an adapters file. Raises ConfigError, which names the table and the field."""
    table = table_of(LORA_FIELD, path, data, MAX_LIST_BYTES)
    try:
        entries = msgspec.convert(table, _AdaptersFile).adapter
    except msgspec.ValidationError as error:
        allowed = f"a file of [[adapter]] tables with name, path, model and revision ({error})"
        raise ConfigError(LORA_FIELD, path, allowed) from error
    twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise ConfigError(LORA_FIELD, path, f"a file with unique adapter names; {twice[0]!r} occurs twice")
    return tuple(entries)


class AdaptersSource:
    """The adapters in force (`entries`), each with its model. `watch` detects changes of the file.

    Only one of a router's processes follows the file. After a restart it uses the content that was last accepted, even
    if the file has become invalid. Raises ConfigError.
    """

    def __init__(self, path: str, catalog: Catalog, part: RouterPart | None = None) -> None:
        self._path = path
        self._agreed = AgreedFile(part, AGREED_NAME) if part is not None else None
        known = self._agreed.read() if self._agreed is not None else None
        content = content_of(LORA_FIELD, path, MAX_LIST_BYTES) if known is None else known
        self.watch = FileWatch([path], known=content)
        self.entries = self._accept(content, catalog)

    def read(self, catalog: Catalog) -> tuple[AdapterEntry, ...]:
        """Put the current content of the file in force. Raises ConfigError."""
        self.entries = self._accept(content_of(LORA_FIELD, self._path, MAX_LIST_BYTES), catalog)
        return self.entries

    def _accept(self, content: bytes, catalog: Catalog) -> tuple[AdapterEntry, ...]:
        entries = tuple(self._with_model(entry, catalog) for entry in adapters_of(self._path, content))
        if self._agreed is not None:
            self._agreed.agree(content)
        return entries

    def _with_model(self, entry: AdapterEntry, catalog: Catalog) -> AdapterEntry:
        """Fill in the name under which the router serves the adapted model."""
        if catalog.has(entry.name):
            allowed = f"a file with adapter names that no model, alias or split has, unlike {entry.name!r}"
            raise ConfigError(LORA_FIELD, self._path, allowed)
        if entry.model and not catalog.is_model(entry.model):
            known = ", ".join(catalog.models)
            allowed = f"a file whose adapter {entry.name!r} has one of the models {known}, not {entry.model!r}"
            raise ConfigError(LORA_FIELD, self._path, allowed)
        model = catalog.targets(entry.model)[0] if entry.model else catalog.models[0]
        return msgspec.structs.replace(entry, model=model)
