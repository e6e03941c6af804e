"""Endpoints for operators that load and unload LoRA adapters on all workers of a model."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from common.config import ADAPTER_NAME
from common.errors import InvalidRequest
from router.api import service_answers
from router.api.openapi import documented
from router.generation import key_of, router_state_of
from router.request import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, Fields

AdapterName = Annotated[str, StringConstraints(pattern=rf"^{ADAPTER_NAME}$")]
"""The names that `--lora` accepts."""


class LoadAdapterRequest(Fields):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Folder in PEFT's layout that every worker can read."
    )
    load_inplace: bool | None = Field(None, description="Replace the adapter that currently has this name.")
    model: str | None = Field(None, description="The base model of the adapter. Default: the default model.")


class UnloadAdapterRequest(Fields):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: AdapterName
    model: str | None = None


adapter_routes = APIRouter(tags=["operate"])
"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""


@adapter_routes.post(LOAD_ADAPTER_PATH, **documented(LoadAdapterRequest, service_answers.LoadedAdapter))
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter on every worker of a model that supports adapters. Returns when all have loaded it."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, LoadAdapterRequest, lease)
    base = await router_state.models.open(fields.model, key_of(request))
    name = fields.lora_name
    known = router_state.models.base_of(name)
    if router_state.models.catalog.has(name) or known not in (None, base.name):
        raise InvalidRequest(
            f"lora_name: {name!r} is already the name of a model or of another model's adapter", param="lora_name"
        )
    outcome = await base.adapters.load(name, fields.lora_path, in_place=bool(fields.load_inplace))
    body = {"status": "ok", "id": name, "parent": base.name, "digest": outcome.digest}
    return Response(orjson.dumps(body | {"num_workers": outcome.num_loaded}), media_type="application/json")


@adapter_routes.post(UNLOAD_ADAPTER_PATH, **documented(UnloadAdapterRequest, service_answers.Status))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter from every worker. Running requests that use it are completed."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, UnloadAdapterRequest, lease)
    models = router_state.models
    known = models.base_of(fields.lora_name)
    base = models.served[known] if known is not None else await models.open(fields.model, key_of(request))
    await base.adapters.unload(fields.lora_name)
    return Response(orjson.dumps({"status": "ok"}), media_type="application/json")
