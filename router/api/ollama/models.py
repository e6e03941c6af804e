"""Ollama's endpoints about models: what is served, and downloads into and deletions from this machine's caches."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import InvalidRequest, ModelError, ModelNotFound, Overloaded
from common.model_files import (
    ModelFiles,
    ModelSummary,
    download_place,
    find_model,
    local_models,
    remove_model,
    summary_of,
)
from router.access import Forbidden
from router.api.ollama.answers import (
    OllamaError,
    OllamaModelFacts,
    OllamaModels,
    OllamaProgress,
    OllamaRunningModels,
    OllamaVersion,
)
from router.api.ollama.fields import OllamaModelRequest, OllamaPullRequest, tagged_name
from router.api.openapi import documented
from router.api.query import json_answer
from router.generation import Object, RouterState, ServedModel, ShownModel, key_of, router_state_of

API_VERSION = "0.13.0"
"""Version of Ollama whose API these endpoints follow. Some clients refuse older ones."""
NEVER = "9999-12-31T00:00:00Z"
"""Time at which a model is unloaded that is kept or has requests."""
MAX_PULLS = 2
"""Maximum number of concurrent downloads of a router process."""
PULL_S = 12 * 3600.0
"""Maximum duration of a download."""
POLL_S = 1.0
"""Interval of progress lines."""
MAX_REASON_BYTES = 4096

ollama_model_routes = APIRouter(tags=["models"])
"""`/api/tags`, `/api/show`, `/api/ps`, `/api/version`, `/api/pull` and `/api/delete`."""
pulling: set[asyncio.subprocess.Process] = set()


@ollama_model_routes.get("/api/version", **documented(None, OllamaVersion, errors=(OllamaError,)))
async def ollama_version() -> Response:
    """Return the version of Ollama's API that this server follows."""
    return json_answer({"version": API_VERSION})


@ollama_model_routes.get("/api/tags", **documented(None, OllamaModels, errors=(OllamaError,)))
async def ollama_tags(request: Request) -> Response:
    """List the models that the API key may use now (Ollama's API)."""
    router_state = router_state_of(request)
    await router_state.models.refresh()
    shown = router_state.models.listed(key_of(request))
    return json_answer({"models": [await _model(router_state, one) for one in shown]})


@ollama_model_routes.get("/api/ps", **documented(None, OllamaRunningModels, errors=(OllamaError,)))
async def ollama_ps(request: Request) -> Response:
    """List the models that workers have loaded (Ollama's API). `size` is their memory."""
    router_state = router_state_of(request)
    found = []
    for one in router_state.models.listed(key_of(request)):
        workers = [] if one.model is None else [w for w in one.model.client.load().workers if w.num_blocks]
        is_loaded = one.state is None or one.state.name == "loaded"
        if workers and is_loaded and not one.parent:
            size = sum(worker.memory_bytes for worker in workers)
            model = await _model(router_state, one)
            running = {"expires_at": _expiry(one), "size_vram": 0, "context_length": one.max_model_len}
            found.append(model | running | {"size": size or model["size"]})
    return json_answer({"models": found})


@ollama_model_routes.post("/api/show", **documented(OllamaModelRequest, OllamaModelFacts, errors=(OllamaError,)))
async def ollama_show(request: Request) -> Response:
    """Describe a served model (Ollama's API)."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, OllamaModelRequest, lease)
    model = await router_state.models.open(fields.wanted, key_of(request))
    summary = await _summary(model)
    architecture = summary.architecture
    info = {
        "general.architecture": architecture,
        "general.parameter_count": summary.num_parameters,
        f"{architecture}.context_length": model.max_model_len,
    }
    return json_answer(
        {
            "modified_at": _created(router_state),
            "template": model.text.chat_template or "",
            "parameters": "",
            "modelfile": "",
            "license": summary.licence,
            "details": _details(model.files, summary),
            "model_info": info,
            "capabilities": model.capabilities,
        }
    )


@ollama_model_routes.post(
    "/api/pull", **documented(OllamaPullRequest, OllamaProgress, lines=True, errors=(OllamaError,))
)
async def ollama_pull(request: Request) -> Response:
    """Download a model into the cache of this machine (Ollama's API). Streams JSON lines unless `stream` is false."""
    router_state = router_state_of(request)
    _check_manages(router_state, "/api/pull")
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, OllamaPullRequest, lease)
    name = fields.wanted
    if download_place(name) is None:
        raise InvalidRequest("model: must be a built-in name, or a Hugging Face id such as org/name", param="model")
    router_state.check_stays()
    if len(pulling) >= MAX_PULLS:
        raise Overloaded(f"{MAX_PULLS} models are being downloaded, the maximum")
    lines = _pull(name)
    if fields.stream is not False:
        return StreamingResponse(
            (orjson.dumps(line) + b"\n" async for line in lines), media_type="application/x-ndjson"
        )
    async for line in lines:
        last = line
    if "error" in last:
        raise InvalidRequest(str(last["error"]), param="model")
    return json_answer(last)


@ollama_model_routes.delete("/api/delete", **documented(OllamaModelRequest, OllamaProgress, errors=(OllamaError,)))
async def ollama_delete(request: Request) -> Response:
    """Delete a model from the caches of this machine, unless it is served (Ollama's API)."""
    router_state = router_state_of(request)
    _check_manages(router_state, "/api/delete")
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, OllamaModelRequest, lease)
    name = fields.wanted

    def delete() -> None:
        try:
            model = find_model(name, local_models())
        except ModelError as error:
            raise ModelNotFound(str(error), param="model") from error
        models = router_state.models
        served = {one.config.model: name for name, one in models.served.items()}
        if model.name in served and (models.loader is None or models.loader.state(served[model.name]).name != "idle"):
            raise InvalidRequest(f"model: {model.name} is served by this router", param="model")
        try:
            remove_model(model)
        except ModelError as error:
            raise InvalidRequest(f"model: {error}", param="model") from error

    await router_state.models.threads.apart(delete)
    return json_answer({"status": "success"})


def _check_manages(router_state: RouterState, path: str) -> None:
    """Refuse downloads and deletions to any client of the network. Keys are checked before. Raises Forbidden."""
    if router_state.access.ring is None and not router_state.is_loopback:
        raise Forbidden(
            f"{path} is disabled, because this router listens on a public address without API keys: use an API key "
            "with admin = true"
        )


async def _pull(name: str) -> AsyncIterator[Object]:
    """Download a model with `diptych pull`, and yield its progress. The download ends with the iteration."""
    command = [sys.executable, "-P", "-m", "common.model_files.pull", name]
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_MININTERVAL": "3600"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **quiet},
    )
    pulling.add(process)
    reading = asyncio.create_task(_last_line(process.stderr), name=f"pull {name}")
    try:
        yield {"status": "pulling manifest"}
        async with asyncio.timeout(PULL_S):
            while process.returncode is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), POLL_S)
                yield {"status": f"pulling {name}"} | _progress(name)
            reason = await reading
        if process.returncode:
            yield {"error": reason.removeprefix("diptych pull: ") or f"exit status {process.returncode}"}
        else:
            yield {"status": "success"}
    except TimeoutError:
        yield {"error": f"the download took longer than {PULL_S / 3600:.0f} h: pull the model again to continue"}
    finally:
        pulling.discard(process)
        reading.cancel()
        if process.returncode is None:
            process.kill()


async def _last_line(stream: asyncio.StreamReader | None) -> str:
    """Read to the end, with bounded memory, and return the last line."""
    assert stream is not None
    tail = b""
    while data := await stream.read(MAX_REASON_BYTES):
        tail = (tail + data)[-MAX_REASON_BYTES:]
    lines = tail.decode(errors="replace").replace("\r", "\n").strip().splitlines()
    return lines[-1] if lines else ""


def _progress(name: str) -> Object:
    place = download_place(name)
    assert place is not None
    folder, total = place
    completed = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            completed += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return {"completed": min(completed, total), "total": total} if total else {"completed": completed}


async def _model(router_state: RouterState, one: ShownModel) -> Object:
    """Return an entry of the list of models. That of a split has no details."""
    name = tagged_name(one.name)
    head: Object = {"name": name, "model": name, "modified_at": _created(router_state)}
    if one.state is not None:
        head["state"] = one.state.name
    if one.model is None:
        size = one.state.num_bytes if one.state is not None else 0
        return head | {"size": size, "digest": _digest(one.name), "details": _details(None, None)}
    files, summary = one.model.files, await _summary(one.model)
    digest = _digest(f"{one.name} {files.weights_hash}")
    return head | {"size": summary.num_bytes, "digest": digest, "details": _details(files, summary)}


def _details(files: ModelFiles | None, summary: ModelSummary | None) -> Object:
    if files is None or summary is None:
        known = dict.fromkeys(("format", "family", "parameter_size", "quantization_level"), "")
        return {"parent_model": "", "families": [], **known}
    number = summary.num_parameters
    return {
        "parent_model": "",
        "format": "gguf" if files.format == "gguf" else "safetensors",
        "family": summary.architecture,
        "families": [summary.architecture],
        "parameter_size": f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M",
        "quantization_level": summary.quantisation,
    }


async def _summary(model: ServedModel) -> ModelSummary:
    return await model.text.apart(lambda: _read_summary(model.files))


@lru_cache(maxsize=256)
def _read_summary(files: ModelFiles) -> ModelSummary:
    try:
        return summary_of(files)
    except ModelError:  # the files have been deleted since the start
        return ModelSummary("", 0, "", "", 0, 0, 0)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expiry(one: ShownModel) -> str:
    """Return when a model will be unloaded."""
    if one.state is None or math.isinf(one.state.expires_in_s):
        return NEVER
    at = datetime.now(UTC) + timedelta(seconds=one.state.expires_in_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _created(router_state: RouterState) -> str:
    return datetime.fromtimestamp(router_state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
