"""`GET /explain`: why a request ran where it did, without its texts, for its own key and for admins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

SECRET = "my-secret-words"


async def test_a_finished_request_by_each_of_its_ids_without_its_texts(running: Any) -> None:
    reply = await running.completion(prompt=SECRET, stop=["stop-secret"], max_tokens=5, user=SECRET)
    names = (reply.headers["x-request-id"], reply.json()["id"], reply.json()["id"] + "-0")
    answers = [await running.http.get("/explain", params={"id": name}) for name in names]
    assert [answer.status_code for answer in answers] == [200] * 3
    body = answers[0].json()
    assert (body["request_id"], body["id"], body["state"], body["status"]) == (*names[:2], "finished", 200)
    assert (body["prompt_tokens"], body["output_tokens"]) == (len(SECRET), 5)
    assert "secret" not in answers[0].text and "quick" not in answers[0].text.lower()


async def test_a_running_and_a_refused_request(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=2))
    headers = {"x-request-id": "mine"}
    asking = asyncio.create_task(
        running.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5}, headers=headers)
    )
    await tools.until(lambda: running.engine.requests)
    body = (await running.http.get("/explain", params={"id": "mine"})).json()
    assert (body["state"], body["status"], body["num_choices"]) == ("running", None, 1)
    running.engine.go.set()
    await asking
    refused = await running.completion(n=0)
    body = (await running.http.get("/explain", params={"id": refused.headers["x-request-id"]})).json()
    assert (body["state"], body["status"], body["error"], body["choices"]) == ("failed", 400, "InvalidField", [])


async def test_a_key_finds_only_its_own_requests(start: Any, tmp_path: Path) -> None:
    keys = {name: f"{name}-has-a-long-key" for name in ("alice", "bob", "root")}
    text = "".join(f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in keys.items()) + "admin = true\n"
    (tmp_path / "keys.toml").write_text(text)
    running = await start(api_key_file=str(tmp_path / "keys.toml"))

    async def ask(name: str, path: str, **how: Any) -> Any:
        headers = {"authorization": f"Bearer {keys[name]}", "x-request-id": "same"}
        return await running.http.request("POST" if "json" in how else "GET", path, headers=headers, **how)

    for name in ("alice", "bob"):
        assert (await ask(name, "/v1/completions", json={"prompt": "hi", "max_tokens": 1})).status_code == 200
    found = {name: (await ask(name, "/explain", params={"id": "same"})).json()["key"] for name in keys}
    assert found == {"alice": "alice", "bob": "bob", "root": "bob"}
    answer_id = (await ask("root", "/explain", params={"id": "same"})).json()["id"]
    refused = await ask("alice", "/explain", params={"id": answer_id})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
    assert (await running.http.get("/explain", params={"id": "same"})).status_code == 401


async def test_an_id_is_required(running: Any) -> None:
    assert (await running.http.get("/explain")).json()["error"]["param"] == "id"


async def test_another_process_of_the_router_may_know_it(running: Any, monkeypatch: Any) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    class Others:
        async def ask_all(self, path: str, **params: str) -> dict[int, bytes]:
            asked.append((path, params))
            return {1: b'{"id": "there"}'} if params["id"] == "there" else {}

    monkeypatch.setattr(running.app.state.router_state, "siblings", Others())
    assert (await running.http.get("/explain", params={"id": "there"})).json() == {"id": "there"}
    assert (await running.http.get("/explain", params={"id": "nowhere"})).status_code == 404
    assert asked == [("/explain", {"id": "there"}), ("/explain", {"id": "nowhere"})]
