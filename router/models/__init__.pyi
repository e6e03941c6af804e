from router.models.adapters_file import LORA_FIELD, AdapterEntry, AdaptersSource
from router.models.catalog import Catalog
from router.models.chat_template import read_template, with_chat_template
from router.models.local_table import LocalTable
from router.models.models_file import (
    MODELS_FIELD,
    ModelEntry,
    ModelsSource,
    ModelTable,
    check_planned,
    fixed_part,
    settings_of,
    table_of,
)

__all__ = [
    "AdapterEntry",
    "AdaptersSource",
    "Catalog",
    "LORA_FIELD",
    "LocalTable",
    "MODELS_FIELD",
    "ModelEntry",
    "ModelTable",
    "ModelsSource",
    "check_planned",
    "fixed_part",
    "read_template",
    "settings_of",
    "table_of",
    "with_chat_template",
]
