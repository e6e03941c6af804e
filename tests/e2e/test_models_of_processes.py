"""Two models behind a router of three processes: each of them says and does the same."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..rig import TwoModels, make_stack_of_two, wait_until
from .test_router_processes import pids, told

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM, MANY = 3, 15
FILE = """
[[model]]
model = "{first}"
name = "first"
aliases = ["one"]
fallbacks = ["second"]

[[model]]
model = "{second}"
name = "second"
"""
SPLIT = """
[[split]]
name = "both"
weights = {{ first = 1, second = 1 }}
"""


class Processes(TwoModels):
    """Each question comes over a connection of its own, so that the kernel deals them out."""

    file: Path

    def write(self, text: str) -> None:
        self.file.write_text(text.format(**self.folders))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.stack.url}{path}", trust_env=False, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.stack.url}{path}", json=body, trust_env=False, timeout=120)

    def complete(self, model: str, **body: Any) -> httpx.Response:
        asked: dict[str, Any] = {"model": model, "prompt": "hi", "temperature": 0, "ignore_eos": True, "max_tokens": 4}
        return self.post("/v1/completions", **asked | body)

    def metric(self, name: str, label: str = "") -> float:
        return told(self.get("/metrics").text, name, label)

    def held(self, model: str) -> float:
        """Requests of a model that all processes together hold for its decode workers."""
        lines = [line for line in self.get("/metrics").text.splitlines() if f'model_name="{model}"' in line]
        return told("\n".join(lines), "diptych_requests_held", 'role="decode"')

    def reload(self) -> float:
        """SIGHUP to the parent; the count of reloads that all processes have then."""
        wanted = self.metric("diptych_reloads_total") + NUM
        self.stack.router.send_signal(signal.SIGHUP)
        return wanted

    def change(self, text: str) -> None:
        self.write(text)
        wanted = self.reload()
        wait_until(lambda: self.metric("diptych_reloads_total") >= wanted, "all have read the file")

    def all_know_all_workers(self) -> bool:
        """Whether each of the processes has every worker ready, by its gauges."""
        return self.metric("diptych_worker_state", 'state="ready"') == NUM * len(self.stack.workers())


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[Processes]:
    file = tmp_path_factory.mktemp("table") / "models.toml"
    file.write_text(FILE.format(**folders))
    flags = ("--models-file", str(file), "--router-processes", str(NUM), "--response-store", "memory")
    stack = make_stack_of_two(folders, flags, tmp_path_factory.mktemp("logs"))
    with stack:
        found = Processes(stack, folders)
        found.file = file
        wait_until(lambda: found.metric("diptych_router_processes") == NUM, "all processes serve")
        wait_until(found.all_know_all_workers, "all processes know all workers")
        yield found
        found.http.close()


def test_any_process_serves_and_lists_every_model(two: Processes) -> None:
    answers = {model: {two.complete(model).json()["choices"][0]["text"] for _ in range(8)} for model in two.folders}
    assert [len(texts) for texts in answers.values()] == [1, 1] and answers["first"] != answers["second"]
    listed = [two.get("/v1/models").json() for _ in range(MANY)]
    assert all(one == listed[0] for one in listed)
    assert {one["id"]: one["ready"] for one in listed[0]["data"]} == {"first": True, "one": True, "second": True}
    before = two.get("/load?model=first").json()["traffic"]["ttft"]["num"]
    for _ in range(6):
        assert two.complete("first").status_code == 200
    loads = [two.get("/load?model=first").json() for _ in range(6)]
    assert {load["traffic"]["ttft"]["num"] for load in loads} == {before + 6}
    assert all([model["id"] for model in load["models"]] == ["first"] for load in loads)
    assert two.get("/load?model=third").status_code == 404


def test_limits_of_a_model_hold_for_all_processes_and_change_while_they_run(two: Processes) -> None:
    two.change(FILE + "requests_per_minute = 7\n")
    try:
        replies = [two.complete("second") for _ in range(MANY)]
        assert [one.status_code for one in replies] == [200] * 7 + [429] * (MANY - 7)
        said = replies[-1].json()["error"]["message"]
        assert "model 'second': limit 7 requests per minute for all keys together" in said
        assert two.complete("first").status_code == 200
    finally:
        two.change(FILE)
    assert two.complete("second").status_code == 200


def test_names_and_splits_change_at_all_processes(two: Processes) -> None:
    two.change(FILE.replace('"one"', '"other"') + SPLIT)
    try:
        for _ in range(MANY):
            names = [one["id"] for one in two.get("/v1/models").json()["data"]]
            assert names == ["first", "other", "second", "both"]
        drawn = {user: {two.complete("both", user=user).json()["model"] for _ in range(6)} for user in "abcdefgh"}
        assert all(len(models) == 1 for models in drawn.values())
        assert len(Counter(models.pop() for models in drawn.values())) == 2
    finally:
        two.change(FILE)
    assert two.complete("other").status_code == 404


def test_a_process_that_is_started_again_serves_what_the_others_do(two: Processes) -> None:
    """It is killed after the file has changed into one that the running processes refuse."""
    two.change(FILE + SPLIT)
    before = two.metric("diptych_reloads_total", 'result="refused"')
    two.write(FILE.replace('name = "second"', 'name = "third"'))
    two.reload()
    wait_until(lambda: two.metric("diptych_reloads_total", 'result="refused"') >= before + NUM, "all refuse it")
    wanted = two.get("/v1/models").json()
    assert [one["id"] for one in wanted["data"]] == ["first", "one", "second", "both"]
    try:
        for victim in range(NUM):
            found = pids(two.stack.router)
            os.kill(found[victim], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while pids(two.stack.router).get(victim, found[victim]) == found[victim]:
                assert two.get("/v1/models").json() == wanted  # a connection to the killed one waits for the next
                assert time.monotonic() < deadline
            for _ in range(MANY):
                assert two.get("/v1/models").json() == wanted
        wait_until(lambda: two.metric("diptych_router_processes") == NUM, "all processes serve")
    finally:
        two.change(FILE)
    wait_until(two.all_know_all_workers, "all processes know all workers")


def test_a_model_at_zero_holds_its_requests_at_each_process_and_is_woken(two: Processes) -> None:
    gone = two.workers("second")
    for worker in gone:
        worker.kill()
    wait_until(lambda: two.metric("diptych_worker_state", 'state="ready"') == NUM * 2, "all processes miss them")
    for _ in range(MANY):
        assert {one["id"]: one["ready"] for one in two.get("/v1/models").json()["data"]}["second"] is False
    with ThreadPoolExecutor(12) as pool:
        held = [pool.submit(two.complete, "second") for _ in range(12)]
        wait_until(lambda: two.held("second") == 12, "all are held")
        assert two.held("first") == 0
        assert two.complete("first").status_code == 200
        for worker in gone:
            two.stack.restart(worker)
        replies = [one.result() for one in held]
    assert [reply.status_code for reply in replies] == [200] * 12
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
    wait_until(two.all_know_all_workers, "all processes know all workers")


def test_a_model_without_workers_falls_back_at_each_process(two: Processes) -> None:
    gone = two.workers("first")
    for worker in gone:
        worker.kill()
    try:
        wait_until(lambda: two.metric("diptych_worker_state", 'state="ready"') == NUM * 2, "all processes miss them")
        before = two.metric("diptych_model_fallbacks_total", 'to="second"')
        assert {two.complete("one").json()["model"] for _ in range(MANY)} == {"second"}
        assert two.metric("diptych_model_fallbacks_total", 'to="second"') == before + MANY
    finally:
        for worker in gone:
            two.stack.restart(worker)
    wait_until(two.all_know_all_workers, "all processes know all workers")


def test_a_batch_over_both_models_is_shown_by_any_process(two: Processes) -> None:
    lines = [
        {
            "custom_id": f"{model}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": f"{number}", "max_tokens": 3, "temperature": 0, "ignore_eos": True},
        }
        for number in range(10)
        for model in ("first", "second")
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    url = f"{two.stack.url}/v1/files"
    uploaded = httpx.post(url, files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, trust_env=False).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = two.post("/v1/batches", **asked).json()
    wait_until(lambda: two.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", "the batch is completed")
    shown = [two.get(f"/v1/batches/{batch['id']}").json() for _ in range(8)]
    assert all(one == shown[0] for one in shown)
    assert shown[0]["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    results = [
        json.loads(line) for line in two.get(f"/v1/files/{shown[0]['output_file_id']}/content").text.splitlines()
    ]
    assert [one["custom_id"] for one in results] == [line["custom_id"] for line in lines]
    assert {one["response"]["body"]["model"] for one in results} == {"first", "second"}
