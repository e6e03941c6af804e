"""OpenAPI schema. Endpoints read bodies themselves to limit their size, so their models are added here."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from common import __version__
from router.api.openai.answers import ErrorBody

REF = "#/components/schemas/{model}"
STATUSES = {
    400: "The request is invalid.",
    401: "The API key is missing or incorrect.",
    403: "The API key does not have the required permission.",
    404: "The model, response, file, batch or path does not exist.",
    405: "The method is not allowed. See the Allow header.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The media type of the body is not supported.",
    429: "A rate limit or the capacity of the service is exceeded. See the Retry-After header.",
    431: "The request headers are too large.",
    500: "The server failed to process the request.",
    503: "No worker is available, or the router is shutting down or full. See the Retry-After header.",
    504: "The request timed out.",
}


def documented(
    request: type[BaseModel] | UnionType | None,
    response: type[BaseModel] | UnionType,
    *,
    streams: bool = False,
    lines: bool = False,
    errors: Sequence[type[BaseModel]] = (ErrorBody,),
) -> dict[str, Any]:
    """Return a route's arguments, for one of `request` as its body and `response` or one of `errors` as its answer.

    With `streams`, the answer may also be server-sent events; with `lines`, one JSON object per line.

    Errors are referenced by name, because FastAPI would build a serializer for each status of each route.
    """
    references = [{"$ref": REF.format(model=error.__name__)} for error in errors]
    body = {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"content": body, "description": text} for status, text in STATUSES.items()
    }
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        events = {"text/event-stream": {"schema": {**event, "description": "One event of the stream."}}}
        answers[200] = {"content": events, "description": "The answer. With `stream: true`, as server-sent events."}
    if lines:
        text = {"application/x-ndjson": {"schema": {"type": "string", "description": "One such object per line."}}}
        answers[200] = {"content": text, "description": "The answer. Unless `stream` is false, as lines of JSON."}
    extra: dict[str, Any] = {}
    if request is not None:
        models = get_args(request) or (request,)
        bodies = [{"$ref": REF.format(model=model.__name__)} for model in models]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"response_model": response, "responses": answers, "openapi_extra": extra}


def install_openapi(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Add the models of requests and errors, which routes reference by name, to `/openapi.json`."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title="Diptych",
                version=__version__,
                description="OpenAI-compatible text generation over disaggregated prefill and decode workers.",
                routes=app.routes,
            )
            _add_models(document, models)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema


def _add_models(document: dict[str, Any], models: Sequence[type[BaseModel]]) -> None:
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for model in models:
        schema = model.model_json_schema(ref_template=REF)
        components.update(schema.pop("$defs", {}))
        components[model.__name__] = schema
