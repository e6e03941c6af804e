"""Two models behind one router, each with a scripted engine that has a text of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI

from common.config import RouterConfig
from common.model_files.files import ModelFiles
from router.generation.models import Models
from router.generation.served_model import ServedModel
from router.models.catalog import Catalog
from router.models.models_file import ModelEntry, ModelTable, Split, settings_of
from router.observe.metrics import RouterMetrics
from router.server.app import build_app
from router.text.text_pipeline import TextPipeline

from .application import Engine


@dataclass
class Several:
    """A running application of two models, `small` and `large`, with their engines."""

    running: Any
    small: Any
    large: Any

    async def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": model, "prompt": "hi", "max_tokens": 5, "temperature": 0} | fields
        reply: httpx.Response = await self.running.http.post("/v1/completions", json=body, headers=headers)
        return reply

    async def listed(self, **headers: str) -> dict[str, Any]:
        reply = await self.running.http.get("/v1/models", headers=headers)
        return {one["id"]: one for one in reply.json()["data"]}


Start = Callable[..., Awaitable[Several]]


def starter(start: Any, files: ModelFiles, text: TextPipeline) -> Start:
    """Starts it; `small` and `large` change what is said of a model."""

    async def run(small: dict[str, Any] | None = None, large: dict[str, Any] | None = None, **settings: Any) -> Several:
        engines = {"small": Engine(text="small. "), "large": Engine(text="large. ")}
        engines["large"].max_model_len = 2048
        entries = (
            ModelEntry("org/small", "small", aliases=("fast",)),
            ModelEntry("org/large", "large"),
        )
        changed = (replace(entries[0], **(small or {})), replace(entries[1], **(large or {})))
        splits = (Split("chat", {"small": 1.0, "large": 1.0}),)
        catalog = Catalog(ModelTable(changed, splits), ["org/small", "org/large"])

        def application(config: RouterConfig) -> FastAPI:
            metrics = RouterMetrics("", None)
            served = [
                ServedModel(
                    engine,
                    text,
                    msgspec.structs.replace(files, model_id=f"org/{name}"),
                    own,
                    RouterMetrics(name, engine.load, front=metrics),
                )
                for (name, engine), own in zip(engines.items(), settings_of(config, catalog.entries), strict=True)
            ]
            metrics.show_models([model.metrics for model in served])
            app = build_app(config, Models(catalog, {model.name: model for model in served}), metrics)
            app.state.router_state.access.models.change({name: one.limits for name, one in catalog.entries.items()})
            return app

        return Several(await start(application=application, **settings), **engines)

    return run
