"""Bodies of the endpoints that load and unload LoRA adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from common.config import ADAPTER_NAME
from router.request.extensions import Fields

AdapterName = Annotated[str, StringConstraints(pattern=rf"^{ADAPTER_NAME}$")]
"""As `--lora` takes it."""


class LoadAdapterRequest(Fields):
    """`POST /v1/load_lora_adapter`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="a folder in PEFT's layout that every worker can read"
    )
    load_inplace: bool | None = Field(None, description="in place of what the name stands for")
    model: str | None = Field(None, description="its base model; without it the default one")


class UnloadAdapterRequest(Fields):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: AdapterName
    model: str | None = None
