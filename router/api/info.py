"""Endpoints without generation: probes, metrics, models, tokenisation, and web pages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

import orjson
from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from common import __version__
from common.errors import RETRY_AFTER_S, InvalidRequest, Unavailable
from router.api import service_answers
from router.api.anthropic import answers as anthropic_answers
from router.api.explain import explained
from router.api.load import history_of, load_of, merged_load, own_load
from router.api.openai import answers as openai_answers
from router.api.openapi import documented
from router.api.pages import (
    CHAT,
    DASHBOARD,
    DOCS,
    HEADERS,
    LIBRARIES,
    LIBRARY_HEADERS,
    LIBRARY_PATH,
    MEDIA_TYPES,
    library,
    page,
)
from router.api.query import MAX_VALUE_SHOWN, parameters
from router.generation import (
    RouterState,
    ServedModel,
    ShownModel,
    conversation_tokens,
    functions_of,
    key_of,
    router_state_of,
)
from router.observe import merged_history
from router.request import MODELS_PATH, check_number_of_ids
from router.request.errors import RequestNotFound, error_response, speaks_anthropic
from router.request.fields import DetokenizeRequest, TokenizeRequest
from router.text import SHORT_TEXT

EITHER_ERROR = (openai_answers.ErrorBody, anthropic_answers.AnthropicErrorBody)

probe_routes = APIRouter(tags=["operate"])
"""`/health`, `/ready`, `/metrics` and other endpoints for operators and orchestrators."""


@probe_routes.get("/", response_class=HTMLResponse)
async def index() -> Response:
    """The chat web page."""
    return HTMLResponse(page(CHAT), headers=HEADERS)


@probe_routes.get("/dashboard", response_class=HTMLResponse)
async def dashboard() -> Response:
    """The dashboard web page. It shows the data of `/load` every second: traffic, latencies, workers, classes, plan."""
    return HTMLResponse(page(DASHBOARD), headers=HEADERS)


@probe_routes.get("/docs", response_class=HTMLResponse)
async def docs() -> Response:
    """The API reference as a web page: Swagger UI with the schema of `/openapi.json`."""
    return HTMLResponse(page(DOCS), headers=HEADERS)


@probe_routes.get(f"{LIBRARY_PATH}{{path:path}}", include_in_schema=False)
async def static_file(path: str) -> Response:
    """A script or font that a web page loads."""
    if path not in LIBRARIES:
        raise HTTPException(404)
    media_type = MEDIA_TYPES[LIBRARIES[path].suffix]
    return Response(library(path), media_type=media_type, headers=LIBRARY_HEADERS)


@probe_routes.get("/live", response_class=RedirectResponse, status_code=308)
async def live() -> Response:
    """Redirect of the dashboard's former path."""
    return RedirectResponse("/dashboard", status_code=308)


@probe_routes.get("/health", **documented(None, service_answers.Status))
async def health(request: Request) -> Response:
    """Liveness probe: 200 while the process is healthy."""
    failure = router_state_of(request).failure()
    if failure:
        return error_response(Unavailable(failure))
    return _json({"status": "ok"})


@probe_routes.get("/ready", **documented(None, service_answers.Readiness))
async def ready(request: Request) -> Response:
    """Readiness probe: 200 while the service accepts requests for any model, or for the model in `?model=`."""
    router_state, asked = router_state_of(request), request.query_params.get("model")
    is_ready, detail = router_state.ready
    if asked is not None and (is_ready or not router_state.draining):
        has_keys = router_state.access.ring is not None  # no key is needed here, so none is known
        is_ready, detail = await router_state.models.availability(asked, with_key=not has_keys)
    if not is_ready:
        return error_response(Unavailable(detail, retry_after_s=RETRY_AFTER_S))
    return _json({"status": "ready", "detail": detail})


@probe_routes.get("/ping", **documented(None, service_answers.Status))
@probe_routes.post("/ping", operation_id="ping_by_post", **documented(None, service_answers.Status))
async def ping(request: Request) -> Response:
    """Liveness probe for SageMaker, equivalent to `/health`."""
    return await health(request)


@probe_routes.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus text format."""
    router_state = router_state_of(request)
    text = await (router_state.metrics.text() if router_state.siblings is None else router_state.siblings.metrics())
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@probe_routes.get("/version", **documented(None, service_answers.Version))
async def version() -> Response:
    """Return the version of this server."""
    return _json({"version": __version__})


@probe_routes.get("/load", **documented(None, service_answers.Load))
async def load(request: Request) -> Response:
    """Return request counts by stage and class, recent traffic, the load of each worker, the plan, and recent events.

    Covers all models together, or only the model in `?model=`.
    """
    router_state, asked = router_state_of(request), request.query_params.get("model")
    model = None if asked is None else await router_state.models.open(asked)
    if router_state.siblings is None:
        return _json(load_of(router_state, model))
    params = {} if model is None else {"model": model.name}
    others = (orjson.loads(body) for body in (await router_state.siblings.ask_all("/load", **params)).values())
    loads = [orjson.loads(orjson.dumps(own_load(router_state, model))), *others]
    return _json(merged_load([one["load"] for one in loads], [one["counts"] for one in loads]))


@probe_routes.get("/load/history", **documented(None, service_answers.LoadHistory))
async def load_history(request: Request) -> Response:
    """Return the load of the last hour in steps of ten seconds, of all models together or of the one in `?model=`.

    It begins with the start of the router's process.
    """
    router_state, asked = router_state_of(request), request.query_params.get("model")
    model = None if asked is None else await router_state.models.open(asked)
    own = history_of(router_state, model)
    if router_state.siblings is None:
        return _json(own)
    params = {} if model is None else {"model": model.name}
    others = (await router_state.siblings.ask_all("/load/history", **params)).values()
    return _json(merged_history([own, *map(orjson.loads, others)]))


@probe_routes.get(
    "/explain",
    **documented(None, service_answers.Explanation) | {"openapi_extra": parameters(id={"type": "string"})},
)
async def explain(request: Request) -> Response:
    """Return why a running or recent request ran where it did, and its predicted and measured times.

    `?id=` is the response's `x-request-id` or `id`. A key without admin rights finds only its own requests.
    """
    router_state, name = router_state_of(request), request.query_params.get("id", "")
    if not name:
        raise InvalidRequest("id: required: the x-request-id or id of a response", param="id")
    ring, key = router_state.access.ring, key_of(request)
    owner = None if ring is None or key.admin else key.name
    if (entry := next(router_state.history.find(name, owner), None)) is not None:
        return _json(explained(entry))
    if router_state.siblings is not None:
        params = {"id": name} if owner is None else {"id": name, "key": owner}
        for body in (await router_state.siblings.ask_all("/explain", **params)).values():
            return Response(body, media_type="application/json")
    history = router_state.history
    raise RequestNotFound(
        f"The request {name[:MAX_VALUE_SHOWN]!r} is unknown here. This router knows the running requests and the last "
        f"{len(history):,} that ended, the oldest {history.span_s:,.0f} s ago."
    )


@probe_routes.post("/reset_prefix_cache", **documented(None, service_answers.Status))
async def reset_prefix_cache(request: Request) -> Response:
    """Make every worker drop its prefix cache."""
    for served in router_state_of(request).models.served.values():
        served.client.reset_prefix_cache()
    return _json({"status": "ok"})


model_routes = APIRouter(tags=["models"])
"""`/v1/models`."""


@model_routes.get(
    MODELS_PATH,
    **documented(None, openai_answers.ModelList | anthropic_answers.AnthropicModelList, errors=EITHER_ERROR),
)
async def models(request: Request) -> Response:
    """List the models that the API key may use now. With the header `anthropic-version`, in Anthropic's format."""
    router_state = router_state_of(request)
    await router_state.models.refresh()
    shown = router_state.models.listed(key_of(request))
    if speaks_anthropic(request.scope):
        return _json(_anthropic_page([_anthropic_model(router_state, one) for one in shown], request.query_params))
    return _json({"object": "list", "data": [_model(router_state, one) for one in shown]})


@model_routes.get(
    f"{MODELS_PATH}/{{model:path}}",
    **documented(None, openai_answers.Model | anthropic_answers.AnthropicModel, errors=EITHER_ERROR),
)
async def model(model: str, request: Request) -> Response:
    """Retrieve one model by name."""
    router_state = router_state_of(request)
    await router_state.models.refresh()
    one = router_state.models.shown(model, key_of(request))
    return _json((_anthropic_model if speaks_anthropic(request.scope) else _model)(router_state, one))


def _model(router_state: RouterState, one: ShownModel) -> dict[str, object]:
    return {
        "id": one.name,
        "object": "model",
        "created": router_state.created,
        "owned_by": "diptych",
        "root": one.name if one.model is None else one.model.files.model_id,
        "parent": one.parent or None,
        "max_model_len": one.max_model_len,
        "ready": one.ready,
        **({} if one.state is None else {"state": one.state.name}),
    }


def _anthropic_model(router_state: RouterState, one: ShownModel) -> dict[str, object]:
    name = one.name
    created = datetime.fromtimestamp(router_state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    unknown = dict.fromkeys(("max_tokens", "capabilities", "deprecated_at", "retires_at", "line"))
    known = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {**known, "max_input_tokens": one.max_model_len, **unknown}


def _anthropic_page(models: list[dict[str, object]], asked: Mapping[str, str]) -> dict[str, object]:
    """Return the page of models after `after_id` and before `before_id`. One page contains all of them."""
    names = [one["id"] for one in models]
    after, before = asked.get("after_id"), asked.get("before_id")
    first = names.index(after) + 1 if after in names else 0
    last = names.index(before) if before in names else len(names)
    data = models[first:last]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


token_routes = APIRouter(tags=["tokens"])
"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer for remote clients."""


@token_routes.post("/tokenize", **documented(TokenizeRequest, service_answers.Tokens))
async def tokenize(request: Request) -> Response:
    """Tokenise a text or a conversation."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, TokenizeRequest, lease)
        model = await router_state.models.open(fields.model, key_of(request))
        token_ids = await _tokens(model, fields)
    body = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}

    def answer() -> Response:
        named = token_ids if fields.return_token_strs else ()
        names = [model.text.tokenizer.id_to_token(token_id) for token_id in named]
        return _json(body | {"token_strs": names if fields.return_token_strs else None})

    return await model.text.apart(answer) if len(token_ids) > SHORT_TEXT else answer()


@token_routes.post("/detokenize", **documented(DetokenizeRequest, service_answers.Text))
async def detokenize(request: Request) -> Response:
    """Convert tokens to text."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, DetokenizeRequest, lease)
        model = await router_state.models.open(fields.model, key_of(request))
        check_number_of_ids(len(fields.tokens), model.max_detokenize_ids)
        shown = await model.text.decode(fields.tokens, skip_special_tokens=bool(fields.skip_special_tokens))
    many = len(fields.tokens) > SHORT_TEXT
    return await model.text.apart(partial(_json, {"prompt": shown})) if many else _json({"prompt": shown})


@token_routes.get("/tokenizer_info", **documented(None, service_answers.TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template of the default model, or of the model in `?model=`."""
    model = await router_state_of(request).models.open(request.query_params.get("model"), key_of(request))
    text, files = model.text, model.files
    tokens = {"bos_token": files.bos_token or None, "eos_token": files.eos_token or None}
    ids = {f"{name}_id": text.tokenizer.token_to_id(token) if token else None for name, token in tokens.items()}
    info = {"tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": text.vocab_size}
    info |= {"model_max_length": model.max_model_len, **tokens, **ids}
    return _json(info | {"pad_token": files.eos_token or None, "chat_template": text.chat_template})


async def _tokens(model: ServedModel, fields: TokenizeRequest) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("prompt: send either prompt or messages, not both or neither", param="prompt")
    most = model.max_tokenize_bytes
    if fields.prompt is not None:
        special = fields.add_special_tokens is not False
        return await model.text.encode(fields.prompt, add_special_tokens=special, max_bytes=most)
    return await conversation_tokens(model, fields, functions_of(fields.tools or ()), max_bytes=most)


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
