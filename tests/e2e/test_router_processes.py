"""A router of three processes, over real connections: each asks anew, so that the kernel deals them out."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess
from router.access.keys import digest_of

from ..rig import MODEL, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM = 3
SECRET, LIMITED = "dpk_" + "a" * 40, "dpk_" + "b" * 40
KEYS = f"""
[[key]]
name = "one"
sha256 = "{digest_of(SECRET.encode()).hex()}"
[[key]]
name = "few"
sha256 = "{digest_of(LIMITED.encode()).hex()}"
requests_per_minute = 7
"""


@pytest.fixture
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "keys-of-processes.toml"


@pytest.fixture
def stack(system_of: Any) -> Stack:
    found: Stack = system_of(router_flags=("--router-processes", str(NUM), "--drain-timeout-s", "20")).stack
    wait_until(lambda: told(page(found), "diptych_router_processes") == NUM, "all processes serve")
    return found


def page(stack: Stack) -> str:
    return httpx.get(f"{stack.url}/metrics", trust_env=False, timeout=30).text


def told(text: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples with a label."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def complete(stack: Stack, **body: Any) -> Any:
    asked = {"model": MODEL, "prompt": "hi", "temperature": 0, "ignore_eos": True, "max_tokens": 5} | body
    reply = httpx.post(f"{stack.url}/v1/completions", json=asked, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(stack: Stack, num_tokens: int) -> str:
    """The text of a streamed answer; "" for one that broke."""
    body = {"model": MODEL, "prompt": "hi", "temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}
    try:
        with httpx.stream(
            "POST", f"{stack.url}/v1/completions", json=body | {"stream": True}, trust_env=False, timeout=120
        ) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    except httpx.TransportError:
        return ""
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def pids(router: StackProcess) -> dict[int, int]:
    """The processes of a router by their numbers."""
    found = {}
    for pid in Path(f"/proc/{router.pid}/task/{router.pid}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "router.process" in words:
            found[int(words[words.index("router.process") + 1])] = int(pid)
    return found


def test_any_process_tells_for_all(stack: Stack) -> None:
    before = page(stack)
    for _ in range(20):
        complete(stack)
    for text in [page(stack) for _ in range(6)]:
        assert told(text, "diptych_router_processes") == NUM
        for name, more in (("vllm:generation_tokens_total", 100), ("vllm:request_success_total", 20)):
            assert told(text, name) - told(before, name) == more
        assert told(text, "vllm:e2e_request_latency_seconds_count") >= 20
        heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
        assert len(heads) == len(set(heads))
        assert all(
            f'diptych_asyncio_tasks{{engine="router",model_name="{MODEL}",process="{n}"}}' in text for n in range(NUM)
        )
    loads = [httpx.get(f"{stack.url}/load", trust_env=False, timeout=30).json() for _ in range(6)]
    assert all(load["traffic"]["ttft"]["num"] >= 20 for load in loads)
    assert all(load["traffic"]["ttft"] == loads[0]["traffic"]["ttft"] for load in loads)


def test_a_killed_process_costs_its_own_streams(stack: Stack) -> None:
    before, found = page(stack), pids(stack.router)
    assert found.keys() == set(range(NUM))
    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(stream, stack, 1500) for _ in range(24)]
        wait_until(lambda: told(page(stack), "diptych_requests_in_flight", 'stage="decode"') == 24, "all stream")
        text = page(stack)
        shares = [told(text, "diptych_requests_in_flight", f'process="{number}"') for number in range(NUM)]
        assert sum(shares) == 24
        victim = max(range(NUM), key=lambda number: shares[number] if shares[number] < 24 else -1)
        os.kill(found[victim], signal.SIGKILL)
        answers = [each.result() for each in streams]
    assert answers.count("") == shares[victim]
    assert len(set(answers) - {""}) == 1
    wait_until(lambda: pids(stack.router).get(victim, found[victim]) != found[victim], "it is started again")
    wait_until(lambda: told(page(stack), "diptych_router_processes") == NUM, "it answers")
    after = page(stack)
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"):
        assert told(after, name) >= told(text, name) >= told(before, name)
    assert (
        told(after, "vllm:time_to_first_token_seconds_count") - told(before, "vllm:time_to_first_token_seconds_count")
        >= 24
    )
    assert {number: pid for number, pid in pids(stack.router).items() if number != victim}.items() <= found.items()
    for _ in range(8):
        complete(stack)


def test_a_conversation_goes_on_at_any_process(stack: Stack) -> None:
    last = None
    for turn in range(10):
        body = {
            "model": MODEL,
            "input": f"{turn}",
            "temperature": 0,
            "max_output_tokens": 4,
            "previous_response_id": last,
        }
        reply = httpx.post(f"{stack.url}/v1/responses", json=body, trust_env=False, timeout=60)
        assert reply.status_code == 200, reply.text
        last = reply.json()["id"]
        assert httpx.get(f"{stack.url}/v1/responses/{last}", trust_env=False, timeout=30).status_code == 200
    items = httpx.get(f"{stack.url}/v1/responses/{last}/input_items?limit=100", trust_env=False, timeout=30).json()
    assert len(items["data"]) == 19


def begin_in_background(stack: Stack, num_tokens: int) -> str:
    body = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": num_tokens, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{stack.url}/v1/responses",
        json=body | {"background": True, "stream": True},
        trust_env=False,
        timeout=60,
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                return str(json.loads(line[6:])["response"]["id"])
    raise AssertionError("no event")


def test_any_process_finds_an_answer_in_the_background(stack: Stack) -> None:
    name = begin_in_background(stack, 40)
    url = f"{stack.url}/v1/responses/{name}"
    texts = {httpx.get(url, params={"stream": "true"}, trust_env=False, timeout=60).text for _ in range(6)}
    assert len(texts) == 1 and "event: response.incomplete" in texts.pop()
    made = [httpx.get(url, trust_env=False, timeout=30).json() for _ in range(4)]
    assert all(one == made[0] and one["status"] == "incomplete" for one in made)
    body = {"model": MODEL, "input": "and", "max_output_tokens": 4, "previous_response_id": name}
    assert httpx.post(f"{stack.url}/v1/responses", json=body, trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_any_process_ends_an_answer_in_the_background(stack: Stack, end: str) -> None:
    for _ in range(4):  # each may begin at another process than the one that ends it
        url = f"{stack.url}/v1/responses/{begin_in_background(stack, 3000)}"
        if end == "cancel":
            assert httpx.post(f"{url}/cancel", trust_env=False, timeout=60).json()["status"] == "cancelled"
        else:
            assert httpx.delete(url, trust_env=False, timeout=60).json()["deleted"] is True
            assert httpx.get(url, trust_env=False, timeout=30).status_code == 404
    wait_until(lambda: told(page(stack), "diptych_background_responses") == 0, "none runs")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_and_signals_are_for_all(system_of: Any, key_file: Path) -> None:
    """SIGHUP has each read the keys again; at SIGTERM running answers complete, and all end."""
    key_file.write_text(KEYS)
    flags = ("--router-processes", str(NUM), "--api-key-file", str(key_file), "--drain-timeout-s", "60")
    stack = system_of(router_flags=flags).stack
    wait_until(lambda: told(page(stack), "diptych_router_processes") == NUM, "all processes serve")
    asked = [
        httpx.get(f"{stack.url}/v1/models", headers=bearer(LIMITED), trust_env=False, timeout=30) for _ in range(15)
    ]
    assert [reply.status_code for reply in asked] == [200] * 7 + [429] * 8
    stack.router.send_signal(signal.SIGHUP)
    wait_until(lambda: told(page(stack), "diptych_reloads_total", 'result="ok"') >= NUM, "all read it again")
    members = {stack.router.pid, *pids(stack.router).values()}
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        answers = [
            pool.submit(
                httpx.post,
                f"{stack.url}/v1/completions",
                json=body,
                headers=bearer(SECRET),
                trust_env=False,
                timeout=120,
            )
            for _ in range(6)
        ]
        wait_until(lambda: told(page(stack), "diptych_requests_in_flight", 'stage="decode"') == 6, "all are answered")
        stack.router.terminate()
        replies = [each.result() for each in answers]
    assert [reply.status_code for reply in replies] == [200] * 6
    assert all(reply.json()["usage"]["completion_tokens"] == 400 for reply in replies)
    stack.router.wait(time.monotonic() + 30)
    assert stack.router.returncode == 0 and not stack.router.forced
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), "all have ended")
