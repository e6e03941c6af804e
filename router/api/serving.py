"""Endpoints for operators and RL trainers that pause workers, put them to sleep, and change their weights.

Names and parameters are those of vLLM (`/pause`, `/sleep`) and SGLang (`/update_weights_from_disk`, and
`/update_weights_from_tensor` except for its body).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, cast, get_args

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from common.wire import MAX_WEIGHT_VERSION, MAX_WEIGHTS_PATH
from router.api import service_answers
from router.api.openapi import documented
from router.api.query import MAX_VALUE_SHOWN, flag, json_answer, number, parameters
from router.dispatch import PauseMode
from router.generation import ServedModel, key_of, router_state_of
from router.request import Fields, Only, encoding_of, upload_parts
from router.request.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType

MODES = get_args(PauseMode)
MODEL = {"model": {"type": "string"}}
VERSION = r"^[!-+\--~]*$"
"""A version is a header of answers, where a comma separates several."""
SHA256 = re.compile(r"[0-9a-f]{64}|")
TENSORS = "application/octet-stream"
TENSORS_S = 3600.0
"""Maximum time, in seconds, for tensors to arrive."""
TAGS = {"weights", "kv_cache"}


class UpdateWeightsRequest(Fields):
    """Body of `POST /update_weights_from_disk`."""

    model_path: Annotated[str, Field(min_length=1, max_length=MAX_WEIGHTS_PATH)] = Field(
        description="Folder or file that every worker can read, with a model of the same configuration."
    )
    weight_version: Annotated[str, Field(max_length=MAX_WEIGHT_VERSION, pattern=VERSION)] | None = Field(
        None, description="Name of the weights in answers. Default: a number."
    )
    abort_all_requests: bool | None = Field(None, description="Abort the running requests instead of waiting for them.")
    keep_pause: bool | None = Field(None, description="Stay paused after the update, until `/resume`.")
    model: str | None = Field(None, description="The model to update. Default: the default model.")
    load_format: Annotated[Any, Only(("auto",))] = None
    is_async: Annotated[Any, Only((False,))] = None
    flush_cache: Annotated[Any, Only((True,))] = None
    token_step: Annotated[Any, Only((0,))] = None
    torch_empty_cache: bool | None = Field(None, description="No effect: the memory of the old weights is reused.")
    recapture_cuda_graph: bool | None = Field(None, description="No effect: steps are always recorded again.")


serving_routes = APIRouter(tags=["operate"])
"""`/pause`, `/resume`, `/sleep`, `/wake_up`, `/update_weights_from_...` and their states."""


@serving_routes.post(
    "/pause",
    **documented(None, service_answers.Status)
    | {"openapi_extra": parameters(mode={"enum": [*MODES]}, clear_cache={"type": "boolean"}, **MODEL)},
)
async def pause(request: Request) -> Response:
    """Pause a model, or all models. New requests wait until `/resume`.

    `mode` is for the running ones: `abort` (default) ends them with the tokens so far, `wait` completes them first, and
    `keep` continues them at `/resume`.
    """
    mode = _mode(request)
    clears = request.query_params.get("clear_cache", "true").lower()
    if clears not in ("true", "1") and mode != "keep":
        raise InvalidRequest("clear_cache: only true is supported, which vLLM deprecates", param="clear_cache")

    async def paused(model: ServedModel) -> None:
        await model.serving.pause(mode)
        if mode != "keep":
            model.client.reset_prefix_cache()

    await _each(request, paused)
    return json_answer({"status": "paused"})


@serving_routes.post("/resume", **documented(None, service_answers.Status) | {"openapi_extra": parameters(**MODEL)})
async def resume(request: Request) -> Response:
    """Resume after `/pause`."""
    await _each(request, lambda model: model.serving.resume())
    return json_answer({"status": "resumed"})


@serving_routes.get("/is_paused", **documented(None, service_answers.IsPaused) | {"openapi_extra": parameters(**MODEL)})
async def is_paused(request: Request) -> Response:
    """Return whether a model, or any model, is paused."""
    return json_answer({"is_paused": any(model.serving.is_paused for model in await _models(request))})


@serving_routes.post(
    "/sleep",
    **documented(None, service_answers.Sleeping)
    | {"openapi_extra": parameters(level={"enum": [0, 1, 2]}, mode={"enum": ["abort", "wait"]}, **MODEL)},
)
async def sleep(request: Request) -> Response:
    """Free the memory of a model, or of all models, on their workers, until `/wake_up`.

    Level 0 only pauses. Levels 1 and 2 free weights and KV cache, and `/wake_up` reads the files again.
    """
    level, mode = number(request.query_params, "level", default=1, least=0, most=2), _mode(request)
    await _each(request, lambda model: model.serving.sleep(mode) if level else model.serving.pause(mode))
    return json_answer({"status": "sleeping", "level": level})


@serving_routes.post("/wake_up", **documented(None, service_answers.Status) | {"openapi_extra": parameters(**MODEL)})
async def wake_up(request: Request) -> Response:
    """Load a model, or all models, again after `/sleep`."""
    tags = set(request.query_params.getlist("tags"))
    if tags and tags != TAGS:
        raise InvalidRequest(
            f"tags: weights and kv_cache wake up together, got only {', '.join(sorted(tags))[:MAX_VALUE_SHOWN]}",
            param="tags",
        )

    async def awake(model: ServedModel) -> None:
        if model.serving.is_paused:  # after level 0
            await model.serving.resume()
        else:
            await model.serving.wake_up()

    await _each(request, awake)
    return json_answer({"status": "awake"})


@serving_routes.get(
    "/is_sleeping", **documented(None, service_answers.IsSleeping) | {"openapi_extra": parameters(**MODEL)}
)
async def is_sleeping(request: Request) -> Response:
    """Return whether a model, or any model, is asleep."""
    return json_answer({"is_sleeping": any(model.serving.is_asleep for model in await _models(request))})


@serving_routes.get(
    "/weight_info", **documented(None, service_answers.WeightInfo) | {"openapi_extra": parameters(**MODEL)}
)
async def weight_info(request: Request) -> Response:
    """Return the version of the weights that answer new requests."""
    router_state = router_state_of(request)
    model = await router_state.models.open(request.query_params.get("model"), key_of(request))
    return json_answer({"weight_version": model.serving.weight_version})


@serving_routes.post("/update_weights_from_disk", **documented(UpdateWeightsRequest, service_answers.UpdatedWeights))
async def update_weights_from_disk(request: Request) -> Response:
    """Change the weights of a model on all of its workers, or, if one fails, on none.

    Running requests end on the old weights. Later ones wait for the new weights.
    """
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, UpdateWeightsRequest, lease)
    model = await router_state.models.open(fields.model, key_of(request))
    num_workers = await model.serving.update(
        fields.model_path,
        fields.weight_version or "",
        aborts=bool(fields.abort_all_requests),
        keep_pause=bool(fields.keep_pause),
    )
    return _updated(model, num_workers)


@serving_routes.post(
    "/update_weights_from_tensor",
    **documented(None, service_answers.UpdatedWeights)
    | {
        "openapi_extra": parameters(
            weight_version={"type": "string", "maxLength": MAX_WEIGHT_VERSION, "pattern": VERSION},
            sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"},
            abort_all_requests={"type": "boolean"},
            keep_pause={"type": "boolean"},
            **MODEL,
        )
        | {"requestBody": {"required": True, "content": {TENSORS: {"schema": {"type": "string", "format": "binary"}}}}}
    },
)
async def update_weights_from_tensor(request: Request) -> Response:
    """Change the weights of a model on all of its workers, or, if one fails, on none.

    The body is a safetensors file with all tensors of the model, which workers get from this router.
    """
    query = request.query_params
    version, sha256 = query.get("weight_version", ""), query.get("sha256", "").lower()
    if len(version) > MAX_WEIGHT_VERSION or not re.fullmatch(VERSION, version):
        raise InvalidRequest(
            f"weight_version: must have at most {MAX_WEIGHT_VERSION} printable characters without spaces and commas, "
            f"got {version[:MAX_VALUE_SHOWN]!r}",
            param="weight_version",
        )
    if not SHA256.fullmatch(sha256):
        raise InvalidRequest(f"sha256: must be 64 hex digits, got {sha256[:MAX_VALUE_SHOWN]!r}", param="sha256")
    aborts, keep_pause = flag(query, "abort_all_requests"), flag(query, "keep_pause")
    _check_tensors(request)
    model = await router_state_of(request).models.open(query.get("model"), key_of(request))
    num_workers = await model.serving.update_from_body(
        lambda max_bytes: _tensors(request, max_bytes), sha256, version, aborts=aborts, keep_pause=keep_pause
    )
    return _updated(model, num_workers)


def _check_tensors(request: Request) -> None:
    """Raise UnsupportedMediaType unless the body is a plain file."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != TENSORS:
        raise UnsupportedMediaType(
            f"Content-Type must be {TENSORS}, for a body that is a safetensors file, got {kind[:MAX_VALUE_SHOWN]!r}. "
            "Pickled tensors, such as SGLang's serialized_named_tensors, are never read."
        )
    if encoding := encoding_of(request.headers):
        raise UnsupportedMediaType(f"Content-Encoding: {encoding} is not supported for tensors.")


async def _tensors(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Return the body in parts. Raises BodyTooLarge, BodyTimeout and ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isascii() and declared.isdigit() else 0
    received, deadline = 0, time.monotonic() + TENSORS_S
    _check_size(num_bytes, max_bytes)
    async for part in upload_parts(request, "the tensors"):
        received += len(part)
        _check_size(received, max_bytes)
        if time.monotonic() > deadline:
            raise BodyTimeout(f"The tensors did not arrive within {TENSORS_S:g} s.")
        yield part


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(
            f"The body has {num_bytes:,} bytes or more; the tensors of this model have at most {max_bytes:,}."
        )


def _updated(model: ServedModel, num_workers: int) -> Response:
    version = model.serving.weight_version
    body = {"success": True, "message": f"{num_workers} workers have weights {version}.", "weight_version": version}
    return Response(orjson.dumps(body | {"num_workers": num_workers}), media_type="application/json")


def _mode(request: Request) -> PauseMode:
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise InvalidRequest(f"mode: must be abort, wait or keep, got {mode[:MAX_VALUE_SHOWN]!r}", param="mode")
    return cast("PauseMode", mode)


async def _models(request: Request) -> list[ServedModel]:
    """Return the model in `?model=`, or all models. Raises ModelNotFound, Forbidden and Unavailable."""
    models, asked = router_state_of(request).models, request.query_params.get("model")
    return list(models.served.values()) if asked is None else [await models.open(asked, key_of(request))]


async def _each(request: Request, act: Callable[[ServedModel], Awaitable[None]]) -> None:
    """Act on all models at the same time. After all have ended, raises the first error."""
    results = await asyncio.gather(*(act(model) for model in await _models(request)), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error
