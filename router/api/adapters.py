"""LoRA adapters of a served model: loaded and unloaded on all its workers, by operators."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from router.api import service_answers
from router.api.openapi import documented
from router.generation import Service, key_of, service_of
from router.request import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, LoadAdapterRequest, UnloadAdapterRequest

adapter_routes = APIRouter(tags=["operate"])
"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""


@adapter_routes.post(LOAD_ADAPTER_PATH, **documented(LoadAdapterRequest, service_answers.LoadedAdapter))
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter on every worker of a model that has places for adapters; answers once all have it."""
    service = service_of(request)
    with service.bodies.lease() as lease:
        fields = await service.read(request, LoadAdapterRequest, lease)
    base = _base(service, request, fields.model)
    name = fields.lora_name
    known = service.models.base_of(name)
    if service.models.catalog.has(name) or known not in (None, base.model_name):
        raise InvalidRequest(f"lora_name: {name!r} is the name of a model or of another's adapter", param="lora_name")
    outcome = await base.adapters.load(name, fields.lora_path, in_place=bool(fields.load_inplace))
    body = {"status": "ok", "id": name, "parent": base.model_name, "digest": outcome.digest}
    return Response(orjson.dumps(body | {"num_workers": outcome.num_loaded}), media_type="application/json")


@adapter_routes.post(UNLOAD_ADAPTER_PATH, **documented(UnloadAdapterRequest, service_answers.Status))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter everywhere; requests that use it already go on to their end."""
    service = service_of(request)
    with service.bodies.lease() as lease:
        fields = await service.read(request, UnloadAdapterRequest, lease)
    known = service.models.base_of(fields.lora_name)
    base = service.models.services[known] if known is not None else _base(service, request, fields.model)
    await base.adapters.unload(fields.lora_name)
    return Response(orjson.dumps({"status": "ok"}), media_type="application/json")


def _base(service: Service, request: Request, asked: str | None) -> Service:
    """The model that an adapter is for: the default one unless the body names another."""
    return service.models.one(asked, key_of(request))
