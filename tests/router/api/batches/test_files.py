"""Uploaded files: kept, listed, read and deleted by the official client, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.access.keys import digest_of

from ...sdk import client_of

MIB = 1024 * 1024
FORM = {"purpose": "batch"}


@pytest.fixture
def response_store() -> str:
    return "memory"


async def upload(running: Any, content: bytes, name: str = "in.jsonl", **form: str) -> httpx.Response:
    reply: httpx.Response = await running.http.post("/v1/files", files={"file": (name, content)}, data=FORM | form)
    return reply


def keys(path: Path, *names: str) -> str:
    """A key file in which each key is its own name."""
    entries = (f'[[key]]\nname = "{name}"\nsha256 = "{digest_of(name.encode()).hex()}"\n' for name in names)
    path.write_text("\n".join(entries))
    path.chmod(0o600)
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def test_a_file_comes_back_as_it_was(sdk: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 5000  # several pieces
    made = await sdk.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), "in.jsonl", "batch")
    assert made.status == "processed" and made.expires_at == made.created_at + 720 * 3600
    assert await sdk.files.retrieve(made.id) == made
    assert (await sdk.files.content(made.id)).content == content
    gone = await sdk.files.delete(made.id)
    assert gone.deleted and gone.id == made.id
    for asked in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError) as unknown:
            await asked(made.id)
        assert unknown.value.code == "file_not_found"


async def test_files_are_listed_in_pages(sdk: openai.AsyncOpenAI) -> None:
    made = [await sdk.files.create(file=(f"{i}.jsonl", b"x"), purpose="batch") for i in range(5)]
    ids = [file.id for file in made]
    assert [file.id async for file in sdk.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in sdk.files.list(order="asc", limit=2)] == ids
    assert [file.id async for file in sdk.files.list(purpose="batch")] == ids[::-1]
    assert [file.id async for file in sdk.files.list(purpose="batch_output")] == []
    page = await sdk.files.list(order="asc", after=ids[2])
    assert [file.id for file in page.data] == ids[3:] and page.has_more is False
    with pytest.raises(openai.BadRequestError, match="the file 'file-x' is not in this list"):
        await sdk.files.list(after="file-x")


async def test_a_file_expires_when_its_client_says(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="expires_after.seconds"):
        await sdk.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})


@pytest.mark.parametrize(
    ("parts", "form", "why"),
    [
        ({"file": ("a", b"x")}, {}, "purpose: is required"),
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}, "purpose: must be batch"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, "file: is required"),
        ({"file": ("a", b"")}, {"purpose": "batch"}, "file: must not be empty"),
        ({"file": ("a", b"x")}, {"purpose": "b" * 2000}, "purpose: must have at most 1,024 bytes"),
        ({"file": ("a", b"x")}, {f"p{i}": "x" * 1000 for i in range(70)}, "the limit of 65,536 bytes without its file"),
        ([("file", ("a", b"x")), ("file", ("b", b"x"))], {"purpose": "batch"}, "file: only one file"),
    ],
)
async def test_a_wrong_form(running: Any, parts: Any, form: dict[str, str], why: str) -> None:
    reply = await running.http.post("/v1/files", files=parts, data=form)
    assert reply.status_code == 400 and why in reply.json()["error"]["message"], reply.text
    assert (await running.http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"x", 415),
        ('multipart/form-data; boundary="' + ";" * 2000, b"--;", 415),
        ("multipart/form-data; boundary=B", b"nonsense", 400),
        ("multipart/form-data; boundary=B", b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nhal', 400),
        ("multipart/form-data; boundary=B", b"--B\r\nContent-Type: a/b\r\n\r\nx\r\n--B--\r\n", 400),
    ],
)
async def test_no_form(running: Any, kind: str, body: bytes, status: int) -> None:
    reply = await running.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert reply.status_code == status, reply.text
    assert await settled(running) == 0


async def settled(running: Any) -> float:
    return await running.metric("diptych_stored_file_bytes")  # type: ignore[no-any-return]


async def test_a_file_that_is_too_large(start: Any) -> None:
    running = await start(max_file_mib=1, max_body_bytes=1024)
    assert (await upload(running, b"x" * MIB)).status_code == 200  # no body of JSON: its bound is another
    reply = await upload(running, b"x" * (MIB + 1))
    assert reply.status_code == 413 and "limit of 1,048,576 bytes" in reply.json()["error"]["message"]
    reply = await upload(running, b"x" * (2 * MIB))  # refused by its declared length
    assert reply.status_code == 413
    assert await settled(running) == MIB


async def test_a_full_store_says_so_and_frees_what_is_deleted(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.stored.location.MAX_FILES", 3)
    running = await start(file_store_mib=1)
    first = (await upload(running, b"x" * 700_000)).json()
    reply = await upload(running, b"x" * 700_000)
    error = reply.json()["error"]
    assert reply.status_code == 413 and error["code"] == "file_storage_full"
    assert "700,000 of 1,048,576 bytes" in error["message"]
    assert (await running.http.delete(f"/v1/files/{first['id']}")).status_code == 200
    assert await settled(running) == 0
    assert [(await upload(running, b"x")).status_code for _ in range(4)] == [200, 200, 200, 413]


async def test_a_client_that_leaves_leaves_nothing(running: Any, connect: Any, tools: Any) -> None:
    _, writer = await connect(running)
    head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
        b"Content-Length: 5000000\r\n\r\n" + head + b"x" * 1_000_000
    )
    await writer.drain()
    store = running.app.state.batches.store
    await tools.until(lambda: store.size.num_bytes > 500_000)
    writer.close()
    await tools.until(lambda: store.size.num_bytes == 0 and store.size.num_entries == 0)


async def test_another_keys_file_is_unknown_and_a_key_has_half(start: Any, tmp_path: Path) -> None:
    running = await start(api_key_file=keys(tmp_path / "keys.toml", "alice", "bob"), file_store_mib=1)
    async with client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        made = await alice.files.create(file=("a", b"x" * 400_000), purpose="batch")
        for asked in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                await asked(made.id)
        assert (await bob.files.list()).data == []
        with pytest.raises(openai.APIStatusError) as full:
            await alice.files.create(file=("a", b"x" * 200_000), purpose="batch")
        assert full.value.status_code == 413 and "of this key 400,000 of 524,288" in full.value.message
        assert (await bob.files.create(file=("a", b"x" * 400_000), purpose="batch")).bytes == 400_000
        assert (await alice.files.retrieve(made.id)).id == made.id


async def test_without_a_store_there_are_no_files(start: Any) -> None:
    running = await start(response_store="off")
    replies = [
        await upload(running, b"x"),
        await running.http.get("/v1/files"),
        await running.http.get("/v1/files/file-x"),
        await running.http.post("/v1/batches", json={}),
        await running.http.get("/v1/batches"),
    ]
    assert [reply.status_code for reply in replies] == [404, 404, 404, 400, 404]
    codes = {reply.json()["error"]["code"] for reply in replies if reply.status_code == 404}
    assert codes == {"files_not_kept"}
    assert "--response-store off" in replies[0].json()["error"]["message"]


async def test_uploads_are_bounded(running: Any, connect: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.batches.upload.MAX_UPLOADS", 1)
    _, writer = await connect(running)
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    writer.write(head + b"Content-Length: 5000\r\n\r\n--B")
    await tools.until(lambda: running.app.state.router_state.num_active)
    reply = await upload(running, b"x")
    assert reply.status_code == 503 and reply.headers["retry-after"]
    writer.close()
    await tools.until(lambda: not running.app.state.router_state.num_active)
    assert (await upload(running, b"x")).status_code == 200


async def test_an_upload_that_stops_is_ended(running: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.request.body.BODY_TIMEOUT_S", 0.05)
    reader, writer = await connect(running)
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    writer.write(head + b"Content-Length: 5000\r\n\r\n--B")
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
