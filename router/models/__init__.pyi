"""Which models a router serves, under which names, and which of them a request gets."""

from router.models.adapters_file import LORA_FIELD, AdapterEntry
from router.models.adapters_source import AdaptersSource
from router.models.catalog import MODELS_FIELD, Catalog
from router.models.entry import ModelEntry, ModelTable
from router.models.model_settings import check_planned, same_model, settings_of
from router.models.models_file import table_of
from router.models.models_source import ModelsSource

__all__ = [
    "AdapterEntry",
    "AdaptersSource",
    "Catalog",
    "LORA_FIELD",
    "MODELS_FIELD",
    "ModelEntry",
    "ModelTable",
    "ModelsSource",
    "check_planned",
    "same_model",
    "settings_of",
    "table_of",
]
