"""A request's class: by header, field, service tier or key, in every API."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, Overloaded

CLASSES = ("name=interactive,ttft_ms=500,tpot_ms=50,priority=5", "name=batch,priority=-5")
TURN = [{"role": "user", "content": "hi"}]
APIS = {
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": TURN, "max_tokens": 1},
}
FREE, BOUND = "a-key-of-sixteen-or-more", "another-key-of-sixteen"
HEADER = "X-Request-Class"


def write_keys(path: Path, classes: str = '["batch", "default"]') -> str:
    path.write_text(
        f'[[key]]\nname = "free"\nkey = "{FREE}"\n[[key]]\nname = "bound"\nkey = "{BOUND}"\nclasses = {classes}\n'
    )
    return str(path)


@pytest.fixture
async def classes(start: Any) -> Any:
    return await start(request_class=CLASSES, slo_ttft_ms=2000.0)


@pytest.mark.parametrize("path", APIS)
async def test_every_api_takes_header_field_and_tier(classes: Any, path: str) -> None:
    asks: list[tuple[dict[str, str], dict[str, str], str]] = [
        ({}, {}, "default"),
        ({HEADER: "interactive"}, {}, "interactive"),
        ({}, {"request_class": "batch"}, "batch"),
        ({HEADER: "batch"}, {"request_class": "batch", "service_tier": "priority"}, "batch"),
        ({}, {"service_tier": "priority"}, "interactive"),
        ({}, {"service_tier": "flex"}, "batch"),
        ({}, {"service_tier": "auto"}, "default"),
        ({}, {"service_tier": "standard_only"}, "default"),
    ]
    for headers, fields, name in asks:
        reply = await classes.http.post(path, json=APIS[path] | fields, headers=headers)
        assert reply.status_code == 200, reply.text
        assert classes.engine.requests[-1].request_class == name, (headers, fields)


async def test_goals_and_priority_are_those_of_the_class(classes: Any) -> None:
    for name, goals in (("interactive", (0.5, 0.05, 5)), ("batch", (0.0, 0.0, -5)), ("default", (2.0, 0.0, 0))):
        await classes.completion(request_class=name)
        request = classes.engine.requests[-1]
        assert (request.ttft_s, request.tpot_s, request.priority, request.share) == (*goals, 0.0)


async def test_a_request_has_the_share_of_its_class(start: Any) -> None:
    running = await start(request_class=("name=gold,share=2.5",))
    await running.completion(request_class="gold")
    assert (running.engine.requests[-1].share, running.engine.requests[-1].lane) == (2.5, "gold")


@pytest.mark.parametrize("path", APIS)
async def test_an_unknown_class_is_told_the_known_ones(classes: Any, path: str) -> None:
    by_field = await classes.http.post(path, json=APIS[path] | {"request_class": "bulk"})
    by_header = await classes.http.post(path, json=APIS[path], headers={HEADER: "bulk"})
    for reply in (by_field, by_header):
        assert reply.status_code == 400
        assert "the class 'bulk' does not exist; available classes: default, interactive, batch" in reply.text
    assert classes.engine.requests == []


async def test_header_and_field_must_agree(classes: Any) -> None:
    fields = APIS["/v1/completions"] | {"request_class": "batch"}
    reply = await classes.http.post("/v1/completions", json=fields, headers={HEADER: "interactive"})
    assert reply.status_code == 400 and "'batch', but the header x-request-class names 'interactive'" in reply.text


async def test_a_key_has_classes_of_its_own(start: Any, tmp_path: Path) -> None:
    running = await start(request_class=CLASSES, api_key_file=write_keys(tmp_path / "keys.toml"))

    async def status(key: str, **fields: Any) -> int:
        fields = APIS["/v1/completions"] | fields
        headers = {"authorization": f"Bearer {key}"}
        return int((await running.http.post("/v1/completions", json=fields, headers=headers)).status_code)

    assert await status(BOUND) == 200 and running.engine.requests[-1].request_class == "batch"
    assert running.engine.requests[-1].key == "bound"
    assert await status(BOUND, request_class="default") == 200
    assert running.engine.requests[-1].request_class == "default"
    assert await status(BOUND, request_class="interactive") == 403
    assert await status(BOUND, service_tier="priority") == 200, "a tier is a wish"
    assert running.engine.requests[-1].request_class == "batch"
    assert await status(FREE, request_class="interactive") == 200


async def test_classes_that_do_not_exist_are_refused_in_the_key_file(start: Any, tmp_path: Path) -> None:
    for wrong in ('["bulk"]', "[]", '"batch"', "[1]"):
        with pytest.raises(ConfigError, match=r"line 7 must have a list of classes from default, interactive, batch"):
            await start(request_class=CLASSES, api_key_file=write_keys(tmp_path / "keys.toml", wrong))


async def test_before_its_body_is_read_a_request_may_be_of_any_class_that_it_can_name(
    start: Any, tmp_path: Path
) -> None:
    running = await start(request_class=CLASSES, api_key_file=write_keys(tmp_path / "keys.toml"))
    callers = []

    def check_room(is_longer: Any, caller: Any) -> None:
        callers.append((caller.key, [one.name for one in caller.classes]))

    running.engine.check_room = check_room
    for key, headers, fields in (
        (FREE, {}, {"request_class": "batch"}),
        (BOUND, {}, {}),
        (FREE, {HEADER: "interactive"}, {}),
    ):
        headers = headers | {"authorization": f"Bearer {key}"}
        await running.http.post("/v1/completions", json=APIS["/v1/completions"] | fields, headers=headers)
    assert callers == [
        ("free", ["default", "interactive", "batch"]), ("free", ["batch"]),
        ("bound", ["batch", "default"]), ("bound", ["batch"]),
        ("free", ["interactive"]), ("free", ["interactive"]),
    ]  # fmt: skip


async def test_the_log_line_names_a_class_that_is_not_the_default(
    classes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    classes.engine.error = Overloaded("full", retry_after_s=2.0)
    await classes.completion(request_class="batch")
    classes.engine.error = None
    await classes.completion()
    lines = [record.__dict__ for record in caplog.records if record.message == "request"]
    assert [(line.get("class"), line["status"]) for line in lines] == [("batch", 429), (None, 200)]


async def test_load_tells_of_each_class(running: Any) -> None:
    (one,) = (await running.http.get("/load")).json()["classes"]
    assert (one["name"], one["num_held"], one["attainment"]) == ("batch", 2, {})
    metrics = (await running.http.get("/metrics")).text
    assert 'diptych_class_waiting_requests{class="batch"' in metrics
    assert 'diptych_class_refusals_total{class="batch",' in metrics
