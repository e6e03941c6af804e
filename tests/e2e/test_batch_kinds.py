"""Batches of embeddings, and batches of a router of several processes, of which one dies."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..pooling_models import WIDTH, make_model
from ..rig import wait_until
from .test_batches import AT_ONCE, NUM_LINES, check_whole, client_of, completed, made
from .test_router_processes import page, pids, told

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("embedding") / "embedding", mode="lasttoken")


def body_of(number: int, model: str) -> dict[str, Any]:
    """Floats, base64 and fewer dimensions in turn; every ninth asks for more dimensions than there are."""
    texts = [f"text {number}", "two panels, hinged together"][: 1 + number % 2]
    shapes: list[dict[str, Any]] = [{}, {"encoding_format": "base64"}, {"dimensions": 16}]
    shape = {"dimensions": WIDTH + 1} if number % 9 == 8 else shapes[number % 3]
    return {"model": model, "input": texts} | shape


def test_embeddings_are_those_of_the_endpoint(system_of: Any, closing: ExitStack, tmp_path: Path, folder: Path) -> None:
    flags = ("--response-store", str(tmp_path / "kept.sqlite3"), "--router-processes", str(NUM))
    stack = system_of(1, 0, model=str(folder), router_flags=flags).stack
    sdk = client_of(stack.router, closing)
    bodies = {f"e{number}": body_of(number, folder.name) for number in range(27)}
    lines = (
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body} for name, body in bodies.items()
    )
    file = sdk.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", "all lines are answered")
    done = sdk.batches.retrieve(batch.id)
    assert done.request_counts is not None and done.output_file_id is not None and done.error_file_id is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (27, 24, 3)
    results = [json.loads(line) for line in sdk.files.content(done.output_file_id).text.splitlines()]
    num_tokens = 0
    for one in results:
        answer = one["response"]["body"]
        direct = httpx.post(f"{stack.url}/v1/embeddings", json=bodies.pop(one["custom_id"]), timeout=60)
        assert answer["data"] == direct.json()["data"] and answer["usage"] == direct.json()["usage"]
        num_tokens += answer["usage"]["prompt_tokens"]
    assert done.usage is not None and (done.usage.input_tokens, done.usage.output_tokens) == (num_tokens, 0)
    failed = [json.loads(line) for line in sdk.files.content(done.error_file_id).text.splitlines()]
    assert [one["custom_id"] for one in failed] == list(bodies)
    assert all(f"at most {WIDTH}," in one["response"]["body"]["error"]["message"] for one in failed)


def test_a_batch_for_another_endpoint_than_the_model_s_fails_by_line(
    system_of: Any, closing: ExitStack, tmp_path: Path, folder: Path
) -> None:
    stack = system_of(1, 0, model=str(folder), router_flags=("--response-store", str(tmp_path / "kept.sqlite3"))).stack
    sdk = client_of(stack.router, closing)
    batch = made_for(sdk, folder.name)
    wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", "all lines are answered")
    done = sdk.batches.retrieve(batch.id)
    assert done.output_file_id is None and done.error_file_id is not None
    (line,) = sdk.files.content(done.error_file_id).text.splitlines()
    result = json.loads(line)
    assert result["response"]["status_code"] == 400
    assert "embeds texts" in result["response"]["body"]["error"]["message"]


def made_for(sdk: openai.OpenAI, model: str) -> Any:
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "hi"}}
    file = sdk.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def test_a_killed_process_leaves_its_batch_to_another(system_of: Any, closing: ExitStack) -> None:
    flags = ("--response-store", "memory", "--batch-concurrency", str(AT_ONCE), "--router-processes", str(NUM))
    stack = system_of(router_flags=flags).stack
    wait_until(lambda: told(page(stack), "diptych_router_processes") == NUM, "all processes serve")
    sdk = client_of(stack.router, closing)
    batch = made(sdk)

    def shown() -> openai.OpenAI:
        """A client whose connection may lead to any process."""
        return client_of(stack.router, closing)

    wait_until(lambda: completed(shown(), batch) >= 5, "some lines are done")
    text, found = page(stack), pids(stack.router)
    (worker,) = (number for number in range(NUM) if told(text, "diptych_batches", f'process="{number}"') == 1)
    os.kill(found[worker], signal.SIGKILL)
    done = completed(shown(), batch)
    assert 5 <= done < NUM_LINES
    wait_until(lambda: shown().batches.retrieve(batch.id).status == "completed", "another process took it up")
    check_whole(shown(), batch)


def test_any_process_cancels_a_batch(system_of: Any, closing: ExitStack) -> None:
    flags = ("--response-store", "memory", "--batch-concurrency", "3", "--router-processes", str(NUM))
    stack = system_of(router_flags=flags).stack
    for _ in range(4):  # each may be cancelled at another process than the one that works on it
        batch = made(client_of(stack.router, closing))
        wait_until(lambda batch=batch: completed(client_of(stack.router, closing), batch) >= 1, "a line is done")
        client_of(stack.router, closing).batches.cancel(batch.id)
        wait_until(
            lambda batch=batch: client_of(stack.router, closing).batches.retrieve(batch.id).status == "cancelled",
            "it is cancelled",
        )
        counts = client_of(stack.router, closing).batches.retrieve(batch.id).request_counts
        assert counts is not None and 1 <= counts.completed < NUM_LINES
