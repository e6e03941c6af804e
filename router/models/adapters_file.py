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
from router.access import table_of

LORA_FIELD = "lora_file"
MAX_LIST_BYTES = 1024 * 1024
"""As many adapters as a worker tells of, with paths of any length, three times over."""
ShortText = Annotated[str, Meta(max_length=256)]
"""The name of a model, or a revision."""


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
