"""A proxy for two vLLM servers joined by NIXL: one computes the prompt, the other gets its blocks' address and streams.

vLLM's protocol for disaggregated prefill: the proxy requests one token with `do_remote_decode` from the prefill server,
and sends its `kv_transfer_params` with the request to the decode server, which pulls the blocks and streams.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.load.http_stream import HttpPool

PATH = "/v1/completions"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class UpstreamError(Exception):
    """A server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {body[:500].decode(errors='replace')}")
        self.status = status


def prefill_body(fields: dict[str, Any]) -> bytes:
    """The same request for one token, not streamed, its KV kept for another server."""
    rest = {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}
    return orjson.dumps({**rest, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE})


class Proxy:
    """Serves completions from a prefill and a decode server."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = HttpPool(prefill), HttpPool(decode)
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route(PATH, self.completions, methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._prefill.close()
        await self._decode.close()

    async def health(self, _: Request) -> Response:
        return Response()

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "model", "object": "model"}]})

    async def completions(self, request: Request) -> Response:
        fields = orjson.loads(await request.body())
        try:
            params = await self._ask_prefill(fields)
        except UpstreamError as error:
            return JSONResponse({"error": {"message": f"prefill server: {error}"}}, error.status)
        body = orjson.dumps({**fields, "kv_transfer_params": params})
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _ask_prefill(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The decode server's parameters to pull the KV. Raises UpstreamError."""
        answer = bytearray()
        collect = lambda _, piece: answer.extend(piece)  # noqa: E731
        status = await self._prefill.post(PATH, prefill_body(fields), collect, collect)
        if status != 200:
            raise UpstreamError(status, bytes(answer))
        params: dict[str, Any] | None = orjson.loads(answer).get("kv_transfer_params")
        if not params:
            raise UpstreamError(502, b"no kv_transfer_params in the prefill server's answer")
        return params

    async def _stream(self, body: bytes) -> AsyncIterator[bytes]:
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        failure = bytearray()

        async def pump() -> None:
            try:
                status = await self._decode.post(
                    PATH, body, lambda _, piece: pieces.put_nowait(piece), lambda _, piece: failure.extend(piece)
                )
                if status != 200:
                    pieces.put_nowait(_error_event(f"decode server: {UpstreamError(status, bytes(failure))}"))
            except (OSError, ValueError) as error:
                pieces.put_nowait(_error_event(f"decode server: {error}"))
            finally:
                pieces.put_nowait(None)

        pumping = asyncio.create_task(pump())
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            pumping.cancel()


def _error_event(message: str) -> bytes:
    return b"data: " + orjson.dumps({"error": {"message": message}}) + b"\n\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.compare.vllm_proxy", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port on the loopback address")
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    options = parser.parse_args(argv)
    app = Proxy(options.prefill, options.decode).app
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
