"""Pieces that are written straight to the connection: the same bytes, and slow clients are still heard of."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from router.generation.generation_response import GenerationResponse
from router.server.http_connection import CycleWriter

TEXT = 'The "quick" brøwn 🦊\n jumps\\ over the lazy dog. '
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 80}
PROMPT = {"prompt": "hi", "max_tokens": 80}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "usage at the end": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    "tools": (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    ),
    "completion": ("/v1/completions", PROMPT),
    "echo": ("/v1/completions", PROMPT | {"echo": True, "n": 2}),
    "echo with logprobs": ("/v1/completions", PROMPT | {"echo": True, "logprobs": 1}),
    "stop string": ("/v1/completions", PROMPT | {"stop": ["lazy"]}),
    "stop strings of choices": ("/v1/completions", PROMPT | {"stop": ["jumps"], "n": 3}),
    "usage in every chunk": (
        "/v1/completions",
        PROMPT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 80}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 80}),
}


async def streamed(running: Any, path: str, body: dict[str, Any]) -> list[str]:
    """The events of an answer without what differs from one to the next, those of each choice in their order."""
    reply = await running.http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    plain = re.sub(r"[0-9a-f]{32}", "ID", reply.text)
    plain = re.sub(r'"(created|created_at)":\d+', r'"\1":0', plain)
    return sorted(plain.split("\n\n"), key=_index) if body.get("n", 1) > 1 else plain.split("\n\n")


def _index(event: str) -> int:
    found = re.search(r'"index":(\d+)', event)
    return int(found[1]) if found else 99


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize("case", CASES)
async def test_the_bytes_are_those_of_the_usual_way(
    start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, case: str, per_event: int
) -> None:
    path, body = CASES[case]
    running = await start(tools.Engine(text=TEXT, per_event=per_event))
    written: list[bytes] = []
    write = CycleWriter.write

    def remember(self: CycleWriter, piece: bytes) -> None:
        written.append(piece)
        write(self, piece)

    monkeypatch.setattr(CycleWriter, "write", remember)
    direct = await streamed(running, path, body)
    assert written and all(written), "no piece took the short way"
    monkeypatch.setattr("router.generation.generation_response.answer_writer_of", lambda scope: None)
    written.clear()
    assert await streamed(running, path, body) == direct and not written


@pytest.mark.parametrize("case", CASES)
async def test_whole_answers_take_the_middle_of_a_choice_at_once(
    start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path, body = CASES[case]
    body = {name: value for name, value in body.items() if name != "stream_options"}
    engine = tools.Engine(text=TEXT)
    running = await start(engine)
    taken: list[bool] = []
    keep = GenerationResponse._keep

    def remember(self: GenerationResponse, *event: Any) -> bool:
        taken.append(keep(self, *event))
        return taken[-1]

    monkeypatch.setattr(GenerationResponse, "_keep", remember)
    direct = await whole(running, path, body)
    assert any(taken) is not any(request.params.logprobs >= 0 for request in engine.requests)
    monkeypatch.setattr(GenerationResponse, "_keep", lambda *_: False)
    assert await whole(running, path, body) == direct


async def whole(running: Any, path: str, body: dict[str, Any]) -> str:
    """An answer without what differs from one to the next."""
    reply = await running.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    plain = re.sub(r"[0-9a-f]{32}", "ID", reply.text)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', plain)


@pytest.mark.slow
async def test_what_a_client_does_not_read_waits_for_it(start: Any, tools: Any) -> None:
    """Its pieces go through the queue that is bounded, and come in order once it reads."""
    running = await start(tools.Engine(text="0123456789", per_event=10, max_model_len=1_000_000))
    body = json.dumps(PROMPT | {"max_tokens": 400_000, "stream": True}).encode()
    narrow = socket.socket()  # so that what the kernel holds of an answer is far less than the answer
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=narrow)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    unread = running.app.state.router_state.unread
    await tools.until(lambda: unread.num_bytes > 0)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    found = "".join(
        json.loads(f"{text}")["choices"][0]["text"] for text in re.findall(r"data: (\{.*\})", answer.decode())
    )
    assert found == "0123456789" * 40_000


async def test_a_bug_in_a_piece_ends_the_answer(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(CycleWriter, "write", fail)
    reply = await running.completion(stream=True, max_tokens=9)
    assert '"code":"internal_error"' in reply.text and "secret" not in reply.text
