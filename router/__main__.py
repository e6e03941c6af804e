"""`python -m diptych.router`: the HTTP front door."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from diptych.common.config import load
from diptych.common.logging import setup_logging
from diptych.common.model.files import resolve_model
from diptych.common.settings import RouterConfig
from diptych.router.api.generate import generate_routes
from diptych.router.api.service import Service
from diptych.router.dispatch.dispatcher import Dispatcher
from diptych.router.metrics import RouterMetrics
from diptych.router.text.pipeline import TextPipeline


def main(argv: Sequence[str]) -> int:
    config = load(RouterConfig, argv, prog="diptych router")
    setup_logging("router", config.log_level, config.log_json)
    files = resolve_model(config.model, progress=False)
    uvloop.run(serve(config, files))
    return 0


async def serve(config, files):
    client = Dispatcher(config)
    await client.start()
    metrics = RouterMetrics(files.model_id, client.load)
    service = Service(client, TextPipeline.from_files(files, threads=config.tokenizer_threads), files, config, metrics)
    app = FastAPI()
    app.include_router(generate_routes(service))
    app.add_api_route("/ready", lambda: JSONResponse(str(service.ready), 200 if service.ready[0] else 503))
    app.add_api_route("/metrics", lambda: Response(metrics.render()))
    await uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, log_level="warning", access_log=False)).serve()
    await client.close()

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
