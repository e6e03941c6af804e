"""The HTTP API byte by byte: bad requests of every kind, and clients that leave."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess

from ..rig import MODEL, PROBE_TIMEOUT_S, PROMPT, complete, owned, wait_until

pytestmark = pytest.mark.e2e

JSON = {"content-type": "application/json"}


# ---------------------------------------------------------------- errors


def raw_request(stack: Stack, body: bytes, *, head: str = "Content-Type: application/json\r\n") -> socket.socket:
    """A connection on which a completion was asked for, byte by byte as given."""
    connection = socket.create_connection(("127.0.0.1", stack.port), timeout=60)
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return connection


def posted(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()


BAD_BODIES: dict[str, tuple[bytes, int, str | None]] = {
    "empty": (b"", 400, None),
    "not JSON": (b'{"model":', 400, None),
    "not an object": (b"[1]", 400, None),
    "NaN": (b'{"model":"tiny-random","prompt":"x","temperature":NaN}', 400, None),
    "Infinity": (b'{"model":"tiny-random","prompt":"x","top_p":Infinity}', 400, None),
    "huge integer": (b'{"model":"tiny-random","prompt":"x","seed":' + b"9" * 4000 + b"}", 400, None),
    "integer above int64": (posted(seed=2**70), 400, "seed"),
    "invalid UTF-8": (b'{"model":"tiny-random","prompt":"\xff\xfe"}', 400, None),
    "lone surrogate": (b'{"model":"tiny-random","prompt":"\\ud800"}', 400, None),
    "deep nesting": (b'{"model":"tiny-random","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None),
    "nested prompt": (b'{"model":"tiny-random","prompt":' + b"[" * 900 + b"]" * 900 + b"}", 400, "prompt"),
    "no prompt": (b'{"model":"tiny-random"}', 400, "prompt"),
    "text for a number": (posted(temperature="1"), 400, "temperature"),
    "boolean for a number": (posted(max_tokens=True), 400, "max_tokens"),
    "too hot": (posted(temperature=2.1), 400, "temperature"),
    "no top_p": (posted(top_p=0), 400, "top_p"),
    "no choices": (posted(n=0), 400, "n"),
    "129 choices": (posted(n=129), 400, "n"),
    "65 stops": (posted(stop=[f"s{number}" for number in range(65)]), 400, "stop"),
    "21 alternatives": (posted(logprobs=21), 400, "logprobs"),
    "id out of vocabulary": (posted(prompt=[5, 261]), 400, "prompt"),
    "negative id": (posted(prompt=[-1]), 400, "prompt"),
    "no ids": (posted(prompt=[]), 400, "prompt"),
    "bias out of vocabulary": (posted(logit_bias={"900": 1}), 400, "logit_bias"),
    "bias of no token": (posted(logit_bias={"x": 1}), 400, "logit_bias"),
    "suffix": (posted(suffix="y"), 400, "suffix"),
    "schema": (posted(response_format={"type": "json_schema"}), 400, "response_format"),
    "prompt and answer too long": (posted(prompt=[65] * 4000, max_tokens=97), 400, "max_tokens"),
    "megabytes": (posted(prompt="x" * 3_000_000), 400, "prompt"),
    "unknown model": (posted(model="gpt-5"), 404, "model"),
}


def answer_on(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error object of the one answer on a connection."""
    with connection, connection.makefile("rb") as reader:
        status = int(reader.readline().split()[1])
        headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(reader.readline, b"\r\n"))
        error: dict[str, Any] = json.loads(reader.read(int(headers["content-length"])))["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return status, headers, error


@pytest.mark.slow_cases("empty", "not JSON")
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_told_what_is_wrong(stack: Stack, name: str) -> None:
    body, wanted_status, param = BAD_BODIES[name]
    status, headers, error = answer_on(raw_request(stack, body))
    assert (status, headers["content-type"]) == (wanted_status, "application/json"), error
    assert param is None or str(error["param"]).partition("[")[0].partition(".")[0] == param, error
    assert error["type"] == "invalid_request_error"


def test_a_bad_stream_is_refused_before_it_begins(stack: Stack) -> None:
    assert answer_on(raw_request(stack, posted(stream=True, temperature=9)))[0] == 400


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("Content-Type: text/plain\r\n", posted(), 415),
        ("Content-Type: application/x-www-form-urlencoded\r\n", posted(), 415),
        ("Content-Type: application/json\r\n", b" " * (9 * 1024 * 1024), 413),
    ],
)
def test_the_body_is_checked_before_it_is_parsed(stack: Stack, head: str, body: bytes, status: int) -> None:
    assert answer_on(raw_request(stack, body, head=head))[0] == status


def test_a_chunked_body_has_the_same_bound(http: httpx.Client) -> None:
    reply = http.post(
        "/v1/completions", content=(b" " * 65536 for _ in range(200)), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413 and reply.json()["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_unknown_paths_and_methods_have_the_same_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    reply = http.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()) == {"error"} and set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_hostile_request_ids_are_harmless(http: httpx.Client) -> None:
    bodies = []
    for name in ("same", "same", "x" * 5000, "a\tb", "../../etc"):
        reply = http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 2, "request_id": name},
            headers={"x-request-id": name},
        )
        assert reply.status_code == 200, reply.text
        bodies.append(reply.json()["id"])
    assert len(set(bodies)) == len(bodies)


# ---------------------------------------------------------------- clients that leave


def generated(worker: StackProcess) -> float:
    text = httpx.get(f"{worker.http_url}/metrics", trust_env=False, timeout=PROBE_TIMEOUT_S).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


@pytest.mark.parametrize("stream", (True, False))
@pytest.mark.parametrize("n", (1, 3))
def test_a_client_that_leaves_aborts_on_both_workers(stack: Stack, stream: bool, n: int) -> None:
    decode = stack.workers("decode")[0]
    before = generated(decode)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3500, "n": n, "ignore_eos": True, "stream": stream}
    with raw_request(stack, json.dumps(body).encode()) as connection:
        if stream:
            assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: generated(decode) > before, "tokens are generated")
        assert owned(stack)[decode.name] > 0
    wait_until(lambda: not any(owned(stack).values()), "every block is given back")
    assert generated(decode) - before < 3500 * n


def test_a_client_that_leaves_during_prefill_aborts_it(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [[i, *([65] * 4000)] for i in range(12)], "max_tokens": 50, "ignore_eos": True}
    with raw_request(stack, json.dumps(body).encode()):
        wait_until(lambda: owned(stack)[stack.workers("prefill")[0].name] > 0, "prefill begins")
    wait_until(lambda: not any(owned(stack).values()), "every block is given back")


@pytest.mark.slow
def test_a_stop_string_ends_the_work_at_once(stack: Stack, http: httpx.Client) -> None:
    text = complete(http, prompt=PROMPT, max_tokens=12)["choices"][0]["text"]
    decode = stack.workers("decode")[0]
    before = generated(decode)
    complete(http, prompt=PROMPT, max_tokens=3500, stop=text[8:11])
    wait_until(lambda: not any(owned(stack).values()), "every block is given back")
    assert generated(decode) - before < 3000


# ---------------------------------------------------------------- poison

NASTY = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    1.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "🙂" * 40,
    [],
    [None],
    [[]],
    {},
    {"a": {}},
)
HARMLESS = {"model": MODEL, "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("/v1/completions", {**HARMLESS, "prompt": "x"}),
        ("/v1/chat/completions", {**HARMLESS, "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_no_value_of_any_field_is_a_server_error(http: httpx.Client, path: str, needed: dict[str, Any]) -> None:
    document = http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert set(needed) <= set(fields)
    for field in fields:
        for value in NASTY:
            reply = http.post(path, content=json.dumps({**needed, field: value}), headers=JSON)
            assert reply.status_code in (200, 400, 404), (field, value, reply.text)
            assert reply.status_code == 200 or reply.json()["error"]["message"], (field, value)
    assert http.post(path, json=needed).status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": "x", "tool_call_id": []},
        "x",
        None,
    ],
)
def test_no_message_is_a_server_error(http: httpx.Client, message: Any) -> None:
    reply = http.post("/v1/chat/completions", json={**HARMLESS, "messages": [message]})
    assert reply.status_code in (200, 400), reply.text
