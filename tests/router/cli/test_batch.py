"""`diptych batch` against the real application: answers, retries, and runs that are stopped and go on."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import InternalError, Overloaded
from router.api.batches.batch_format import BadBatch, BatchRequest, BatchResult, check_requests, take_up
from router.api.batches.sender import BatchSender, Refused, SendSettings
from router.cli import batch
from router.cli.batch import main
from router.dispatch.client import GenerationRequest, TokenEvent

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def line(name: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": path, "body": body or {"prompt": name, "max_tokens": 3}}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def results(path: Path) -> dict[str, Any]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def run(source: Path, target: Path, url: str, *flags: str) -> int:
    return await asyncio.to_thread(in_process, [str(source), str(target), "--url", url, *flags])


def in_process(argv: list[str]) -> int:
    command = [sys.executable, "-P", "-m", "router.cli.batch", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


async def test_every_request_is_answered_once(running: Any, tmp_path: Path) -> None:
    many = [line(f"r{i}") for i in range(40)]
    source = written(tmp_path / "in.jsonl", *many, "", line("chat", "/v1/chat/completions", **CHAT))
    target = tmp_path / "out.jsonl"
    assert await run(source, target, running.url) == 0
    found = results(target)
    assert len(found) == 41
    assert found["r7"]["response"]["body"]["choices"][0]["text"] == "The"
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "The"
    assert found["chat"]["response"]["request_id"] and found["chat"]["error"] is None
    assert await run(source, target, running.url) == 0
    assert len(running.engine.requests) == 41  # nothing is sent again


@pytest.mark.slow
async def test_a_request_that_is_wrong_has_its_error(running: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", line("bad", prompt="x", max_tokens=-1), line("good"))
    assert await run(source, tmp_path / "out.jsonl", running.url) == 1
    found = results(tmp_path / "out.jsonl")
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert found["good"]["response"]["status_code"] == 200


@pytest.mark.slow
async def test_a_busy_server_is_asked_again(start: Any, tools: Any, tmp_path: Path) -> None:
    class Busy(tools.Engine):  # type: ignore[misc, name-defined]
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
            self.requests.append(request)
            if len(self.requests) <= 6:
                raise Overloaded("busy", retry_after_s=0.01)
            async for event in self._events(request):
                yield event

    running = await start(Busy())
    source = written(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(3)))
    assert await run(source, tmp_path / "out.jsonl", running.url) == 0
    assert len(results(tmp_path / "out.jsonl")) == 3 and len(running.engine.requests) == 9


@pytest.mark.slow
async def test_what_always_fails_is_its_own_fault(start: Any, tools: Any, tmp_path: Path) -> None:
    running = await start(tools.Engine(error=InternalError("it broke")))
    source = written(tmp_path / "in.jsonl", line("r"))
    assert await run(source, tmp_path / "out.jsonl", running.url) == 1
    assert results(tmp_path / "out.jsonl")["r"]["response"]["status_code"] == 500
    assert len(running.engine.requests) == 5


@pytest.mark.slow
async def test_patience_ends_and_a_later_run_tries_again(running: Any, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", line("r")), tmp_path / "out.jsonl"
    assert await run(source, target, "http://127.0.0.1:1", "--patience-s", "1") == 1
    assert results(target)["r"]["response"] is None and "gave up" in results(target)["r"]["error"]["message"]
    assert await run(source, target, running.url) == 0
    assert results(target)["r"]["response"]["status_code"] == 200


@pytest.mark.slow
async def test_a_wrong_key_stops_all(start: Any, tmp_path: Path) -> None:
    running = await start(api_key="right")
    source, target = written(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(9))), tmp_path / "out.jsonl"
    assert await run(source, target, running.url) == 2 and target.read_text() == ""
    assert await run(source, target, running.url, "--api-key", "right") == 0


async def test_a_model_that_the_key_may_not_use_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 401 is an answer to the client, a 403 one to its request."""
    status = 403

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status if b"other" in request.content else 200, json={"error": {"message": "no"}})

    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    found: list[BatchResult] = []
    subject = BatchSender(SendSettings("http://router", {}, 1, 60.0, 60.0), found.append)
    names = ("mine", "other", "mine too")
    await subject.run(BatchRequest(name, "/v1/completions", {"model": name}) for name in names)
    assert [(result.custom_id, result.status) for result in found] == [*zip(names, (200, 403, 200), strict=True)]
    status = 401
    with pytest.raises(Refused, match="HTTP 401: no"):
        await subject.run(iter([BatchRequest("other", "/v1/completions", {"model": "other"})]))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
async def test_a_stopped_run_goes_on(start: Any, tools: Any, tmp_path: Path, number: signal.Signals) -> None:
    class Slow(tools.Engine):  # type: ignore[misc, name-defined]
        others, all_may = itertools.count(-5), asyncio.Event()  # the run does not end before its sixth line

        async def _events(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
            if next(self.others) >= 0:
                await self.all_may.wait()
            async for event in super()._events(request):
                yield event

    engine = Slow()
    running = await start(engine)
    source = written(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(40)))
    target = tmp_path / "out.jsonl"
    argv = [str(source), str(target), "--url", running.url, "--concurrency", "2"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "router.cli.batch", *argv, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(30):
        while not target.exists() or target.read_bytes().count(b"\n") < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await run(source, target, running.url) == 2  # another run writes it
        process.send_signal(number)
        _, said = await process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert number == signal.SIGKILL or b"run the same command to resume" in said
    before = target.read_bytes().count(b"\n")
    assert before < 40
    engine.all_may.set()
    with target.open("ab") as torn:
        torn.write(b'{"custom_id": "r39", "resp')
    assert await run(source, target, running.url) == 0
    assert len(results(target)) == 40 and not any(name.startswith(".") for name in os.listdir(tmp_path))


class Full(io.FileIO):
    """A file on a disk with space for 100 bytes."""

    def write(self, data: Any) -> int:
        if not (room := 100 - self.tell()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[:room])


def test_a_full_disk_ends_a_run_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sender:
        def __init__(self, settings: Any, on_result: Any) -> None:
            self.on_result = on_result

        async def run(self, requests: Any) -> None:
            for request in requests:
                self.on_result(BatchResult(request.custom_id, 200, "", {}))

    monkeypatch.setattr(batch, "BatchSender", Sender)
    source, target = written(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(4))), tmp_path / "out.jsonl"
    with monkeypatch.context() as full:
        full.setattr(batch, "_locked", lambda path: Full(path, "ab"))
        assert main([str(source), str(target)]) == 1
    said = capsys.readouterr().err
    assert f"cannot write {target}: no space is left on the disk (" in said and "bytes are needed, " in said
    assert said.endswith("; 0 answered; run the same command to resume\n") and target.stat().st_size == 100
    assert main([str(source), str(target)]) == 0 and len(results(target)) == 4


def test_a_full_disk_is_named_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batch, "take_up", full)
    target = tmp_path / "out.jsonl"
    assert main([str(written(tmp_path / "in.jsonl", line("r"))), str(target)]) == 2
    assert f"diptych batch: cannot write {target}: no space is left on the disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1: invalid JSON"),
        ("[]", "line 1: must be a JSON object"),
        ({"url": "/v1/completions", "body": {}}, "line 1: custom_id"),
        (line("r", "/v1/models"), "line 1: invalid url '/v1/models'"),
        ({**line("r"), "method": "GET"}, "line 1: invalid method"),
        ({**line("r"), "body": 5}, "line 1: body"),
        (line("r", prompt="x", stream=True), "line 1: stream and background are not supported"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_sent(tmp_path: Path, text: Any, why: str) -> None:
    source = written(tmp_path / "in.jsonl", text)
    with pytest.raises(BadBatch) as error:
        check_requests(source)
    assert why in str(error.value)
    assert main([str(source), str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:1"]) == 2


def test_names_are_unique(tmp_path: Path) -> None:
    with pytest.raises(BadBatch, match="duplicate custom_id"):
        check_requests(written(tmp_path / "in.jsonl", line("r"), line("r")))


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path) -> None:
    precious = written(tmp_path / "notes.jsonl", {"a": 1})
    before = precious.read_bytes()
    with pytest.raises(BadBatch, match="choose another output file"):
        take_up(precious)
    assert precious.read_bytes() == before and os.listdir(tmp_path) == ["notes.jsonl"]
    assert main([str(written(tmp_path / "in.jsonl", line("r"))), str(tmp_path / "no" / "out")]) == 2
