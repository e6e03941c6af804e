"""A router's HTTP front as a process of its own, before a scripted engine, so that a test can kill it.

python crashing_router.py PORT STORE: every line of a batch takes 20 ms and adds its prompt to STORE.asked. Leases run
out after a second, so that its next life need not wait.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from common.config import RouterConfig
from common.model_files.resolve import resolve_model
from router.dispatch.client import GenerationRequest, TokenEvent
from router.dispatch.load import DispatchLoad
from router.generation.models import Models
from router.generation.served_model import ServedModel
from router.observe.metrics import RouterMetrics
from router.server.app import build_app
from router.server.server import listen, serve, stop_on_signals
from router.stored import batches
from router.text.text_pipeline import TextPipeline


async def main(port: int, store: str) -> None:
    batches.LEASE_S = 1.0
    stop, files = stop_on_signals(), resolve_model("tiny-random")
    text = TextPipeline.from_files(files, threads=1)
    engine = Slow(Path(f"{store}.asked"))
    config = RouterConfig(model="tiny-random", response_store=store, batch_concurrency=3)
    metrics = RouterMetrics("tiny-random", engine.load)
    model = ServedModel(engine, text, files, config, metrics)  # type: ignore[arg-type]
    app = build_app(config, Models.of_one(model), metrics)

    async def close() -> None:
        pass

    await serve(app, listen("127.0.0.1", port), close, stop)
    text.close()


class Slow:
    """A `ServingClient` that answers one token."""

    max_model_len = 0
    ready = (True, "")

    def __init__(self, asked: Path) -> None:
        self._asked = asked

    def check_room(self, *_: object) -> None:
        pass

    def load(self) -> DispatchLoad:
        return DispatchLoad({}, (), {}, {}, {}, 0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        with self._asked.open("ab") as file:
            file.write(bytes(token for token in request.prompt_token_ids if token < 256) + b"\n")
        await asyncio.sleep(0.02)
        yield TokenEvent((65,), (), "length", 0, None, ())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
