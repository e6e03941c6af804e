"""Compressed bodies are decoded within the bound of bodies, or refused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from router.request import body as request_body

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()


def raw_deflate(data: bytes) -> bytes:
    """Deflate data without a header, as some clients send it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODERS = [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("Deflate", raw_deflate)]


async def post(running: Any, data: bytes, encoding: str, path: str = "/v1/completions") -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return await running.http.post(path, content=data, headers=headers)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
@pytest.mark.parametrize("num_spaces", [0, request_body.FIRST_BYTES, 3_000_000])
async def test_a_compressed_body(
    running: Any, encoding: str, encode: Callable[[bytes], bytes], num_spaces: int
) -> None:
    reply = await post(running, encode(BODY + b" " * num_spaces), encoding)
    assert reply.status_code == 200, reply.text
    assert running.app.state.router_state.bodies.num_bytes == 0
    assert (
        await post(running, encode(b'{"prompt": "hi"}' + b" " * num_spaces), encoding, "/tokenize")
    ).status_code == 200


async def test_no_encoding_has_names(running: Any) -> None:
    for named in ("", "identity", "Identity"):
        assert (await post(running, BODY, named)).status_code == 200


@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
async def test_a_bomb_is_not_decoded(
    start: Any, monkeypatch: pytest.MonkeyPatch, encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    """A body of twenty thousand bytes would be twenty million. Nothing beyond the bound is decoded."""
    running = await start(max_body_bytes=200_000)
    held: list[int] = []
    router_state = running.app.state.router_state
    lease = type(router_state.bodies.lease())
    take = lease.take

    def watched(self: Any, num_bytes: int) -> None:
        take(self, num_bytes)
        held.append(self.budget.num_bytes)

    monkeypatch.setattr(lease, "take", watched)
    bomb = encode(BODY + b" " * 20_000_000)
    assert len(bomb) < 25_000
    reply = await post(running, bomb, encoding)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert "when decoded" in reply.json()["error"]["message"]
    assert max(held) <= 200_000 and router_state.bodies.num_bytes == 0


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("encoding", "encode"), ENCODERS)
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_every_cut_into_parts(encoding: str, encode: Callable[[bytes], bytes], size: int) -> None:
    whole = BODY * 3000 + b" " * 3_000_000
    data = encode(whole)

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]
        yield b""

    pieces = [piece async for piece in request_body.decoded(parts(), encoding.lower().removeprefix("x-"), 10**6)]
    assert b"".join(pieces) == whole and max(map(len, pieces)) <= request_body.DECODED_BYTES


async def test_encoded_bytes_have_the_bound_too(start: Any) -> None:
    """Blocks without content are decoded to nothing, however many they are."""
    running = await start(max_body_bytes=20_000)

    async def parts() -> AsyncIterator[bytes]:
        yield b"\x78\x9c"
        for _ in range(100):
            yield b"\x00\x00\x00\xff\xff" * 1000

    headers = {"content-type": "application/json", "content-encoding": "deflate"}
    reply = await running.http.post("/v1/completions", content=parts(), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


async def test_decoded_bytes_count_among_those_of_all_bodies(start: Any) -> None:
    running = await start(max_body_bytes=2_000_000)
    bodies = running.app.state.router_state.bodies
    bodies.num_bytes = bodies.max_bytes - 500_000
    reply = await post(running, gzip.compress(BODY + b" " * 1_000_000), "gzip")
    assert reply.status_code == 503 and bodies.num_bytes == bodies.max_bytes - 500_000


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(
    "data", [b"", b"\x1f", gzip.compress(BODY)[:-1], gzip.compress(BODY)[:10], BODY, gzip.compress(BODY) * 2],
    ids=["empty", "a byte", "cut", "a head", "JSON", "twice"],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_data_of_another_kind(running: Any, data: bytes, encoding: str) -> None:
    reply = await post(running, data, encoding)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("named", ["zstd", "br", "gzip, gzip", "gzip, identity", "none"])
async def test_an_encoding_that_is_not_known(running: Any, named: str) -> None:
    for data in (BODY, BODY + b" " * 3_000_000):
        reply = await post(running, data, named)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "gzip, deflate" in reply.json()["error"]["message"]


async def test_two_headers(running: Any) -> None:
    headers = [("content-type", "application/json"), ("content-encoding", "gzip"), ("content-encoding", "gzip")]
    reply = await running.http.post("/v1/completions", content=gzip.compress(gzip.compress(BODY)), headers=headers)
    assert reply.status_code == 415


@pytest.mark.parametrize("response_store", ["memory"])
async def test_files_come_as_they_are(running: Any) -> None:
    reply = await running.http.post(
        "/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"}, headers={"content-encoding": "gzip"}
    )
    assert reply.status_code == 415
