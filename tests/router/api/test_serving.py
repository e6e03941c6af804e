"""Endpoints that pause, sleep and change weights: their parameters, and what they ask of the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.errors import Unavailable
from router.access.access_control import ADMIN_PATHS

from ...waiting import until


class Serving:
    """Notes what it is asked to do."""

    is_paused = is_asleep = False
    weight_version = "default"
    max_bytes = 1000

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def pause(self, mode: str) -> None:
        self.is_paused = True
        self.asked.append(("pause", mode))

    async def resume(self) -> None:
        self.is_paused = False
        self.asked.append(("resume",))

    async def sleep(self, mode: str) -> None:
        self.is_asleep = True
        self.asked.append(("sleep", mode))

    async def wake_up(self) -> None:
        self.is_asleep = False
        self.asked.append(("wake_up",))

    async def update(self, path: str, weight_version: str, *, aborts: bool, keep_pause: bool) -> int:
        self.weight_version = weight_version or "7"
        self.asked.append(("update", path, weight_version, aborts, keep_pause))
        return 3

    async def update_from_body(
        self, body: Callable[[int], AsyncIterator[bytes]], sha256: str, weight_version: str, **options: bool
    ) -> int:
        data = b"".join([part async for part in body(self.max_bytes)])
        self.weight_version = weight_version or "7"
        self.asked.append(("update_from_body", data, sha256, weight_version, options))
        return 3


@pytest.fixture
def serving(running: Any) -> Serving:
    found = running.app.state.router_state.models.default.serving = Serving()
    return found


async def test_pauses_and_sleeps(running: Any, serving: Serving) -> None:
    http = running.http
    assert (await http.post("/pause")).json() == {"status": "paused"}
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    assert running.engine.num_resets == 1, "as in vLLM, a pause clears the caches"
    assert (await http.post("/resume")).json() == {"status": "resumed"}
    assert (await http.post("/pause?mode=keep")).status_code == 200 and running.engine.num_resets == 1
    assert (await http.post("/wake_up")).json() == {"status": "awake"}
    assert (await http.post("/sleep?level=2&mode=wait")).json() == {"status": "sleeping", "level": 2}
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.post("/wake_up?tags=weights&tags=kv_cache")).json() == {"status": "awake"}
    assert (await http.post("/sleep?level=0")).status_code == 200
    orders = [("pause", "abort"), ("resume",), ("pause", "keep"), ("resume",), ("sleep", "wait"), ("wake_up",)]
    assert serving.asked == [*orders, ("pause", "abort")]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        *(("/pause?mode=later", "mode"), ("/pause?clear_cache=false", "clear_cache"), ("/sleep?level=3", "level")),
        *(("/sleep?level=x", "level"), ("/wake_up?tags=weights", "tags"), ("/pause?model=absent", None)),
    ],
)
async def test_wrong_parameters_change_nothing(running: Any, serving: Serving, path: str, param: str | None) -> None:
    reply = await running.http.post(path)
    assert reply.status_code in (400, 404) and serving.asked == []
    assert param is None or reply.json()["error"]["param"] == param


async def test_all_models_are_paused_at_the_same_time_even_if_one_fails(several: Any) -> None:
    served = (await several()).running
    models = served.app.state.router_state.models.served
    large = models["large"].serving = Serving()

    class Failing(Serving):
        async def pause(self, mode: str) -> None:
            await until(lambda: large.is_paused)
            raise Unavailable("No worker is ready.")

    models["small"].serving = Failing()
    reply = await served.http.post("/pause")
    assert reply.status_code == 503 and reply.json()["error"]["message"] == "No worker is ready."
    assert large.asked == [("pause", "abort")]


async def test_an_update(running: Any, serving: Serving) -> None:
    asked = {"model_path": "/w", "weight_version": "v", "load_format": "auto", "is_async": False, "flush_cache": True}
    reply = await running.http.post("/update_weights_from_disk", json=asked | {"abort_all_requests": True})
    assert reply.json() == {
        "success": True, "message": "3 workers have weights v.", "weight_version": "v", "num_workers": 3,
    }  # fmt: skip
    assert (await running.http.get("/weight_info")).json() == {"weight_version": "v"}
    await running.http.post("/update_weights_from_disk", json={"model_path": "/w", "keep_pause": True})
    assert serving.asked == [("update", "/w", "v", True, False), ("update", "/w", "", False, True)]


@pytest.mark.parametrize(
    "field",
    [{"load_format": "dummy"}, {"is_async": True}, {"flush_cache": False}, {"token_step": 1}, {"model_path": ""}],
)
@pytest.mark.parametrize("version", ["v", "a\nb", "a,b"])
async def test_what_would_change_the_update_is_refused(
    running: Any, serving: Serving, field: dict[str, Any], version: str
) -> None:
    """A version is a header of answers, where a comma separates several."""
    reply = await running.http.post("/update_weights_from_disk", json={"model_path": "/w", **field})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == next(iter(field))
    reply = await running.http.post("/update_weights_from_disk", json={"model_path": "/w", "weight_version": version})
    assert reply.status_code == (200 if version == "v" else 400)


FROM_TENSOR, BYTES = "/update_weights_from_tensor", {"content-type": "application/octet-stream"}


async def test_an_update_from_tensors(running: Any, serving: Serving) -> None:
    sha256 = "0F" * 32
    query = {"weight_version": "v", "sha256": sha256, "abort_all_requests": "true"}
    reply = await running.http.post(FROM_TENSOR, params=query, headers=BYTES, content=b"x" * 1000)
    assert reply.json() == {
        "success": True, "message": "3 workers have weights v.", "weight_version": "v", "num_workers": 3,
    }  # fmt: skip
    options = {"aborts": True, "keep_pause": False}
    assert serving.asked == [("update_from_body", b"x" * 1000, sha256.lower(), "v", options)]


@pytest.mark.parametrize(
    ("query", "headers", "status", "why"),
    [
        ({}, {"content-type": "application/json"}, 415, "serialized_named_tensors, are never read"),
        ({}, {**BYTES, "content-encoding": "gzip"}, 415, "Content-Encoding: gzip"),
        ({"weight_version": "a,b"}, BYTES, 400, "weight_version: must have at most 256"),
        ({"sha256": "0f"}, BYTES, 400, "sha256: must be 64 hex digits, got '0f'"),
        ({"keep_pause": "x"}, BYTES, 400, "keep_pause: must be true or false"),
        ({"model": "absent"}, BYTES, 404, "absent"),
        ({}, BYTES, 413, "the tensors of this model have at most 999"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_refused_tensors_change_nothing(
    running: Any, serving: Serving, query: dict[str, str], headers: dict[str, str], status: int, why: str, chunked: bool
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 1000

    serving.max_bytes = 999
    body: Any = parts() if chunked else b"x" * 1000
    reply = await running.http.post(FROM_TENSOR, params=query, headers=headers, content=body)
    assert reply.status_code == status and why in reply.json()["error"]["message"], reply.text
    assert serving.asked == []


def test_they_are_for_admins() -> None:
    paths = {"/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/weight_info"}
    assert {*paths, "/update_weights_from_disk", FROM_TENSOR} <= ADMIN_PATHS


async def test_answers_state_the_version_of_the_weights(running: Any) -> None:
    reply = await running.completion(max_tokens=1)
    assert reply.headers["x-weight-version"] == "default" and "metadata" not in reply.json()
    assert "x-weight-version" not in (await running.http.get("/v1/models")).headers
