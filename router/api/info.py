"""What does not generate: probes, metrics, models, tokens, and the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import orjson
from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from diptych.common import __version__
from diptych.common.errors import InvalidRequest, Unavailable
from diptych.router.api import responses
from diptych.router.api.anthropic import count_tokens
from diptych.router.api.anthropic_fields import CountTokensRequest
from diptych.router.api.chat import conversation_tokens
from diptych.router.api.errors import MESSAGES_PATH, error_response
from diptych.router.api.fields import DetokenizeRequest, TokenizeRequest
from diptych.router.api.openapi import documented
from diptych.router.api.service import Service
from diptych.router.api.structure import functions_of

M = TypeVar("M", bound=BaseModel)

PAGE = Path(__file__).parent.parent / "static" / "index.html"
NOT_READY_RETRY_S = 1.0


def probe_routes(service: Service) -> APIRouter:
    """`/health`, `/ready`, `/metrics` and the like: for people and machines that look after the service."""
    router = APIRouter(tags=["operate"])
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "<!doctype html><title>Diptych</title>Diptych"

    @router.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        """A chat page."""
        return HTMLResponse(page)

    @router.get("/health", **documented(None, responses.Status))
    async def health() -> Response:
        """200 while the process is alive and sound."""
        failure = service.failure()
        if failure:
            return error_response(Unavailable(failure))
        return _json({"status": "ok"})

    @router.get("/ready", **documented(None, responses.Readiness))
    async def ready() -> Response:
        """200 when requests would be served."""
        is_ready, detail = service.ready
        if not is_ready:
            return error_response(Unavailable(detail, retry_after_s=NOT_READY_RETRY_S))
        return _json({"status": "ready", "detail": detail})

    @router.get("/ping", **documented(None, responses.Status))
    @router.post("/ping", operation_id="ping_by_post", **documented(None, responses.Status))
    async def ping() -> Response:
        """Like `/health`, under SageMaker's name."""
        return await health()

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/version", **documented(None, responses.Version))
    async def version() -> Response:
        """The version of this server."""
        return _json({"version": __version__})

    @router.get("/load", **documented(None, responses.Load))
    async def load() -> Response:
        """Requests in flight by stage, and each worker's load."""
        snapshot = service.client.load()
        workers = [asdict(worker) for worker in snapshot.workers]
        return _json({"server_load": sum(snapshot.stages.values()), "stages": snapshot.stages, "workers": workers})

    @router.post("/reset_prefix_cache", **documented(None, responses.Status))
    async def reset_prefix_cache() -> Response:
        """Have every worker forget the prefixes it cached."""
        service.client.reset_prefix_cache()
        return _json({"status": "ok"})

    return router


def model_routes(service: Service) -> APIRouter:
    """`/v1/models`."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", **documented(None, responses.ModelList))
    async def models() -> Response:
        """The served model."""
        return _json({"object": "list", "data": [_model(service, service.model_name)]})

    @router.get("/v1/models/{model:path}", **documented(None, responses.Model))
    async def model(model: str) -> Response:
        """The served model, by name."""
        return _json(_model(service, service.check_model(model)))

    return router


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "diptych",
        "root": service.files.model_id,
        "max_model_len": service.max_model_len,
    }


def token_routes(service: Service) -> APIRouter:
    """`/tokenize`, `/detokenize`, `/tokenizer_info`: what a remote tokenizer needs."""
    router = APIRouter(tags=["tokens"])
    text, files = service.text, service.files

    @router.post("/tokenize", **documented(TokenizeRequest, responses.Tokens))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a rendered conversation."""
        with service.bodies.lease() as lease:
            fields = await service.read(request, TokenizeRequest, lease)
            service.check_model(fields.model)
            token_ids = await _tokens(service, fields)
        names = [text.tokenizer.id_to_token(token_id) for token_id in token_ids] if fields.return_token_strs else None
        body = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids}
        return _json(body | {"token_strs": names})

    @router.post("/detokenize", **documented(DetokenizeRequest, responses.Text))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        with service.bodies.lease() as lease:
            fields = await service.read(request, DetokenizeRequest, lease)
            service.check_model(fields.model)
            shown = await text.decode(fields.tokens, skip_special_tokens=bool(fields.skip_special_tokens))
        return _json({"prompt": shown})

    wrong = responses.AnthropicErrorBody

    @router.post(f"{MESSAGES_PATH}/count_tokens", **documented(CountTokensRequest, responses.TokenCount, error=wrong))
    async def message_tokens(request: Request) -> Response:
        """How many tokens the prompt of a conversation has, in the shape of Anthropic's API."""
        with service.bodies.lease() as lease:
            fields = await service.read(request, CountTokensRequest, lease)
            return _json({"input_tokens": await count_tokens(service, fields)})

    @router.get("/tokenizer_info", **documented(None, responses.TokenizerInfo))
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        tokens = {"bos_token": files.bos_token or None, "eos_token": files.eos_token or None}
        ids = {f"{name}_id": text.tokenizer.token_to_id(token) if token else None for name, token in tokens.items()}
        info = {"tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": text.vocab_size}
        info |= {"model_max_length": service.max_model_len, **tokens, **ids}
        return _json(info | {"pad_token": files.eos_token or None, "chat_template": text.chat_template})

    return router


async def _tokens(service: Service, fields: TokenizeRequest) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
    if fields.prompt is not None:
        return await service.text.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    return await conversation_tokens(service, fields, functions_of(fields.tools or ()))


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
