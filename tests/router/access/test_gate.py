"""Keys, limits and the audit log through the real application on a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ConfigError, Unavailable
from router.access.limits import CONCURRENCY_RETRY_S
from router.request.errors import InvalidField

ALICE, BOB = "alices-secret-key-1", "bobs-secret-key-22"


def entry(name: str, secret: str, *more: str) -> str:
    return "\n".join(("[[key]]", f'name = "{name}"', f'key = "{secret}"', *more, ""))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def write(path: Path, *entries: str) -> None:
    path.write_text("".join(entries))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("alice", ALICE), entry("bob", BOB))
    return path


async def test_keys_of_the_file_open(start: Any, keys: Path) -> None:
    running = await start(api_key_file=str(keys), api_key="the-one-of-the-flag")
    for secret, status in ((ALICE, 200), (BOB, 200), ("the-one-of-the-flag", 200), ("no-key-at-all-00", 401)):
        assert (await running.http.get("/v1/models", headers=bearer(secret))).status_code == status


async def test_what_concerns_everybody_is_for_admins(start: Any, keys: Path) -> None:
    write(keys, entry("alice", ALICE), entry("bob", BOB, "admin = true"))
    running = await start(api_key_file=str(keys))
    for secret, status in ((ALICE, 403), (BOB, 200), ("wrong", 401)):
        replies = [
            await running.http.get("/load", headers=bearer(secret)),
            await running.http.post("/reset_prefix_cache", headers=bearer(secret)),
        ]
        assert [reply.status_code for reply in replies] == [status] * 2
    assert running.engine.num_resets == 1


async def test_salts_follow_the_key_and_not_the_client(start: Any, keys: Path) -> None:
    team = 'cache_group = "team"'
    write(keys, entry("alice", ALICE), entry("bob", BOB, team), entry("carol", "carols-secret-key-3", team))
    running = await start(api_key_file=str(keys))
    salts: dict[tuple[str, str | None], str] = {}
    for secret in (ALICE, BOB, "carols-secret-key-3"):
        for own in (None, "mine"):
            await running.http.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 1, "cache_salt": own}, headers=bearer(secret)
            )
            salts[secret[0], own] = running.engine.requests[-1].cache_salt
    assert salts["b", None] == salts["c", None] and salts["b", "mine"] == salts["c", "mine"]
    assert len(set(salts.values())) == 4
    forged = {"prompt": "a", "max_tokens": 1, "cache_salt": salts["a", None]}
    await running.http.post("/v1/completions", json=forged, headers=bearer(BOB))
    assert running.engine.requests[-1].cache_salt not in salts.values()


async def test_without_keys_the_salt_is_the_clients(running: Any) -> None:
    await running.completion(cache_salt="mine")
    assert running.engine.requests[-1].cache_salt == "mine"


# ---------------------------------------------------------------- limits


async def limited(start: Any, keys: Path, *limits: str, **settings: Any) -> Any:
    write(keys, entry("alice", ALICE, *limits), entry("bob", BOB))
    return await start(api_key_file=str(keys), headers=bearer(ALICE), **settings)


async def test_requests_per_minute(start: Any, keys: Path) -> None:
    running = await limited(start, keys, "requests_per_minute = 2")
    first = await running.completion(max_tokens=1)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await running.http.get("/v1/models")).status_code == 200
    refused = await running.completion(max_tokens=1)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 15 <= int(refused.headers["retry-after"]) <= 30 and "'alice'" in error["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0" and refused.headers["x-request-id"]
    assert (await running.http.get("/health")).status_code == 200
    assert (await running.http.get("/v1/models", headers=bearer(BOB))).status_code == 200
    line = 'diptych_rate_limited_total{engine="router",key="alice",limit="requests"'
    assert await running.metric(line) == 1


async def test_tokens_per_minute(start: Any, keys: Path) -> None:
    running = await limited(start, keys, "tokens_per_minute = 60")
    answer = await running.completion(prompt="x" * 50, max_tokens=30)  # it overdraws, but is not cut off
    assert answer.json()["usage"]["total_tokens"] == 80
    assert answer.headers["x-ratelimit-limit-tokens"] == "60"
    refused = await running.completion(prompt="x", max_tokens=1)
    assert refused.status_code == 429 and 10 <= int(refused.headers["retry-after"]) <= 22
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert len(running.engine.requests) == 1
    assert (await running.http.get("/v1/models")).status_code == 200


async def test_a_prompt_that_no_waiting_helps_is_refused_for_good(start: Any, keys: Path) -> None:
    running = await limited(start, keys, "tokens_per_minute = 60")
    reply = await running.completion(prompt="x" * 61)
    assert reply.status_code == 400 and "61" in reply.text and "60" in reply.text


async def test_a_prompt_that_was_not_computed_is_not_charged(start: Any, keys: Path) -> None:
    running = await limited(start, keys, "tokens_per_minute = 60")
    running.engine.error = Unavailable("no worker")
    for _ in range(3):
        assert (await running.completion(prompt="x" * 50)).status_code == 503
    running.engine.error = None
    assert (await running.completion(prompt="x" * 50, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("leaves", [False, True])
async def test_requests_at_once(start: Any, tools: Any, keys: Path, leaves: bool) -> None:
    """Running requests count until they end or their client leaves."""
    running = await limited(start, keys, "concurrent_requests = 2")
    running.engine.hold_after = 1
    asked = [asyncio.create_task(running.completion(max_tokens=2, stream=bool(i))) for i in range(2)]
    await tools.until(lambda: len(running.engine.requests) == 2)
    refused = await running.completion(max_tokens=2)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == CONCURRENCY_RETRY_S
    if leaves:
        for task in asked:
            task.cancel()
    running.engine.go.set()
    await asyncio.gather(*asked, return_exceptions=True)
    await tools.until(lambda: running.app.state.router_state.num_active == 0)
    assert (await running.completion(max_tokens=2)).status_code == 200


async def test_a_refusal_for_lack_of_room_says_when_there_is_some(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=Unavailable("full", retry_after_s=1.0)))
    router_state = running.app.state.router_state
    loop = asyncio.get_running_loop()
    for i in range(20):  # two a second
        router_state.completion_rate.ended(loop.time() - 10 + i / 2)
    router_state.num_active = 19
    reply = await running.completion(max_tokens=2)
    router_state.num_active -= 19
    assert 9 <= int(reply.headers["retry-after"]) <= 30
    running.engine.error = Unavailable("full", retry_after_s=7.0)
    assert (await running.completion(max_tokens=2)).headers["retry-after"] == "7"


# ---------------------------------------------------------------- what is written down


def audit_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
async def test_the_audit_log_has_each_request_with_its_key(start: Any, tools: Any, keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    running = await limited(start, keys, "requests_per_minute = 5", audit_log=str(path))
    await running.completion(prompt="my prompt", max_tokens=3)
    await running.chat(max_tokens=2, stream=True)
    await running.completion(n=0)
    running.engine.error, running.engine.error_after = Unavailable("gone"), 1
    await running.completion(max_tokens=3, stream=True)
    await running.http.get("/v1/models", headers=bearer("wrong-key-0123456"))
    await running.http.get("/v1/models")
    await running.http.get("/v1/models")
    await running.http.get("/health")
    await tools.until(lambda: len(audit_lines(path)) == 7)
    lines = audit_lines(path)
    shown = [(line["key"], line["path"], line["status"], line["finish_reason"], line["error"]) for line in lines]
    assert shown == [
        ("alice", "/v1/completions", 200, "length", None),
        ("alice", "/v1/chat/completions", 200, "length", None),
        ("alice", "/v1/completions", 400, None, "InvalidField"),
        ("alice", "/v1/completions", 503, None, "Unavailable"),
        (None, "/v1/models", 401, None, "Unauthorized"),
        ("alice", "/v1/models", 200, None, None),
        ("alice", "/v1/models", 429, None, "RateLimited"),
    ]
    first = lines[0]
    assert (first["model"], first["prompt_tokens"], first["output_tokens"], first["method"]) == (
        "tiny-random", 9, 3, "POST",
    )  # fmt: skip
    assert first["client"].startswith("127.0.0.1:") and first["duration_ms"] > 0 and first["request_id"]
    text = path.read_text()
    assert "my prompt" not in text and ALICE not in text and "wrong-key" not in text and "The quick" not in text
    assert await running.metric('diptych_key_requests_total{engine="router",key="alice"') == 6
    assert await running.metric('diptych_key_tokens_total{engine="router",key="alice",kind="output"') == 6


@pytest.mark.slow
async def test_a_client_that_leaves_is_in_the_audit_log(start: Any, tools: Any, keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    running = await limited(start, keys, audit_log=str(path))
    running.engine.hold_after = 1
    asked = asyncio.create_task(running.completion(max_tokens=5))
    await tools.until(lambda: running.engine.requests)
    asked.cancel()
    await tools.until(lambda: audit_lines(path))
    assert [(line["status"], line["output_tokens"]) for line in audit_lines(path)] == [(499, 1)]


async def test_the_name_of_the_key_is_in_the_log_and_no_value_of_a_field(start: Any, keys: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    running = await limited(start, keys)
    reply = await running.completion(stream="a private thought")
    assert "private" in reply.json()["error"]["message"]
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert (record.key, record.reason) == ("alice", "stream: must be true or false")
    assert "private" not in caplog.text and ALICE not in caplog.text


def test_a_field_error_keeps_the_value_apart() -> None:
    error = InvalidField("n: must be an integer", " (got 'x')", param="n")
    assert (error.message, error.problem) == ("n: must be an integer (got 'x')", "n: must be an integer")


# ---------------------------------------------------------------- files that change


async def test_a_changed_key_file_holds_within_two_seconds(start: Any, tools: Any, keys: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    running = await start(api_key_file=str(keys))
    access = running.app.state.router_state.access
    watching = asyncio.create_task(access.watch())
    try:
        replace(keys, entry("alice", "alices-other-key-2"))
        await until_status(running.http, bearer(ALICE), 401)
        assert (await running.http.get("/v1/models", headers=bearer("alices-other-key-2"))).status_code == 200
        assert f"API keys: 1 are valid after the change of {keys}: removed bob; other secrets for alice" in caplog.text
        write(keys, entry("alice", "alices-other-key-2"), '[[key]]\nname = "x y"\nkey = "hush-hush-hush-hush"\n')
        await tools.until(lambda: "rejected" in caplog.text)
        assert "line 5" in caplog.text and "hush" not in caplog.text
        assert (await running.http.get("/v1/models", headers=bearer("alices-other-key-2"))).status_code == 200
        assert await running.metric('diptych_reloads_total{engine="router",model_name="tiny-random",result="ok"') == 1
        write(keys, entry("bob", BOB))
        access.reload()  # SIGHUP calls it
        await until_status(running.http, bearer(BOB), 200)
        assert f"API keys: 1 are valid after the change of {keys}: removed alice; added bob" in caplog.text
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def replace(path: Path, text: str) -> None:
    """Kubernetes replaces a file by another with the same name."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


async def until_status(client: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/v1/models", headers=headers)).status_code != status:  # noqa: ASYNC110 (over a socket)
            await asyncio.sleep(0.05)


async def test_files_that_cannot_be_used_refuse_the_start(start: Any, tmp_path: Path) -> None:
    for field in ("api_key_file", "audit_log"):
        with pytest.raises(ConfigError, match=field):
            await start(**{field: str(tmp_path / "nowhere" / "file")})
