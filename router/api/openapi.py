"""The OpenAPI schema. The endpoints read bodies themselves, to bound their size, so their models are added here."""

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
    400: "the request is wrong",
    401: "missing or wrong key",
    403: "only for keys with admin = true",
    404: "no such model, response or path",
    405: "not this method; see Allow",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "more than this service or this key takes; see Retry-After",
    431: "the request's head is too large",
    500: "the server failed",
    503: "no worker, draining or full; see Retry-After",
    504: "a deadline passed",
}


def documented(
    request: type[BaseModel] | UnionType | None,
    response: type[BaseModel] | UnionType,
    *,
    streams: bool = False,
    errors: Sequence[type[BaseModel]] = (ErrorBody,),
) -> dict[str, Any]:
    """Arguments of a route that takes one of `request` as its body and answers with `response`, or one of `errors`.

    Errors are referred to by name: FastAPI would build a serializer for each status of each route.
    """
    references = [{"$ref": REF.format(model=error.__name__)} for error in errors]
    body = {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"content": body, "description": text} for status, text in STATUSES.items()
    }
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        events = {"text/event-stream": {"schema": {**event, "description": "one event of the answer"}}}
        answers[200] = {"content": events, "description": "the answer; with stream: true as server-sent events"}
    extra: dict[str, Any] = {}
    if request is not None:
        models = get_args(request) or (request,)
        bodies = [{"$ref": REF.format(model=model.__name__)} for model in models]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"response_model": response, "responses": answers, "openapi_extra": extra}


def install_openapi(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Add the models to `/openapi.json` to which routes refer by name: of requests and of errors."""

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
