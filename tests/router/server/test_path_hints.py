"""What an unknown path is answered with."""

from __future__ import annotations

from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HINTS = {
    "/chat/completions": CHAT,
    "/v1/v1/chat/completions": CHAT,
    "/v1/chat/completions/": CHAT,
    "/openai//v1/chat/completions": CHAT,
    "/v1/chat/completion": CHAT,
    "/completions": COMPLETIONS,
    "/v1/engines/davinci/completions": COMPLETIONS,
    "/generate": COMPLETIONS,
    "/models/tiny-random": "/v1/models/tiny-random",
    "/v1/load": "/load",
    "/healthz": "/health",
}


async def test_a_wrong_path_names_the_right_one(running: Any) -> None:
    said = {}
    for path in HINTS:
        error = (await running.http.post(path, json={})).json()["error"]
        assert error["code"] == "unknown_url"
        said[path] = error["message"]
    assert said == {path: f"Unknown path: {path}. Did you mean {meant}?" for path, meant in HINTS.items()}


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/", "/" + "x/" * 500])
async def test_a_path_like_no_other_gets_the_list(running: Any, path: str) -> None:
    error = (await running.http.get(path)).json()["error"]
    assert error["message"] == f"Unknown path: {path[:200]}. GET /docs lists all paths."
