"""Waits that run out, on workers that are frozen or hang and do not count as dead: the client's error."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import Stack, StackProcess

from ..rig import MODEL, PROBE_TIMEOUT_S, complete, faulty, owned, samples, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PATIENCE_S = 120.0
TIMEOUT_S, DRAIN_S = 2.0, 5.0
REQUEST_TIMEOUT_S = 5.0
TRIES = 5
BLIND = ("--worker-timeout-s", "60", "--local-prefill-threshold", "0")
NEVER_STUCK = ("--stall-timeout-s", "300")
"""Neither silence nor a standing engine tells these routers anything: what ends a wait is its own deadline."""


def load(stack: Stack) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{stack.url}/load", timeout=PROBE_TIMEOUT_S, trust_env=False).json()
    return answer


def readiness(stack: Stack) -> tuple[int, str]:
    reply = httpx.get(f"{stack.url}/ready", timeout=PROBE_TIMEOUT_S, trust_env=False)
    return reply.status_code, reply.text


def is_ending(stack: Stack) -> bool:
    status, text = readiness(stack)
    return status == 503 and "This router is shutting down" in text


def runs_some(worker: StackProcess) -> bool:
    return sum(samples(worker, "vllm:num_requests_running")) >= 1


def wait_for_stage(stack: Stack, stage: str, count: int) -> None:
    wait_until(lambda: load(stack)["stages"][stage] >= count, f"{count} requests in the {stage} phase", PATIENCE_S)


def wait_until_all_ready(stack: Stack) -> None:
    wait_until(lambda: {worker["state"] for worker in load(stack)["workers"]} == {"ready"}, "all ready", PATIENCE_S)


def ask(stack: Stack, *, stream: bool) -> tuple[int, dict[str, Any]]:
    """The status, and the error that ended the answer."""
    body = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 3500, "ignore_eos": True, "stream": stream}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    last = reply.text if reply.status_code != 200 else reply.text.strip().rpartition("data: ")[2]
    error: dict[str, Any] = json.loads(last)["error"]
    return reply.status_code, error


# ---------------------------------------------------------------- the request's own


@pytest.mark.parametrize("phase", ["queue", "prefill", "transfer", "decode"])
def test_a_request_whose_time_is_over_names_its_phase(system_of: Any, phase: str) -> None:
    flags = ("--request-timeout-s", str(REQUEST_TIMEOUT_S), *BLIND)
    stack = system_of(router_flags=flags, worker_flags=NEVER_STUCK).stack
    (prefill,), (decode,) = stack.workers("prefill"), stack.workers("decode")
    wait_until_all_ready(stack)
    if phase == "queue":
        decode.kill()
        wait_until(lambda: readiness(stack)[0] == 503, "not ready", PATIENCE_S)
    elif phase != "decode":
        (prefill if phase == "prefill" else decode).pause()
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, stack, stream=stream) for stream in (False, True)]
            wait_for_stage(stack, phase, 2)
            if phase == "decode":
                decode.pause()
            (status, error), (stream_status, stream_error) = (one.result() for one in asked)
    finally:
        prefill.resume()
        if decode.alive:
            decode.resume()
        else:
            stack.restart(decode)
    assert (
        status == 504
        and error["message"] == f"The request exceeded its deadline of {REQUEST_TIMEOUT_S:g} s in its {phase} phase."
    )
    assert stream_error == error
    assert stream_status == (200 if phase in ("transfer", "decode") else 504)  # begun, or not
    wait_until_all_ready(stack)
    wait_until(lambda: not any(owned(stack).values()), "both workers dropped it", PATIENCE_S)


# ---------------------------------------------------------------- tokens


@pytest.fixture
def hanging(system_of: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, Path]]:
    """Two decode workers. The second hangs from the moment that the file is made, and never counts as dead."""
    timeouts = ("--prefill-timeout-s", str(TIMEOUT_S), "--token-timeout-s", str(TIMEOUT_S))
    system, flag = system_of(0, 2, router_flags=timeouts, worker_flags=NEVER_STUCK), tmp_path / "hang"
    victim = system.stack.workers("decode")[1]
    with faulty(system.stack, victim, hang=flag):
        wait_until_all_ready(system.stack)
        yield system, victim, flag
    wait_until_all_ready(system.stack)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_worker_that_sends_no_token_loses_its_requests(
    hanging: tuple[Any, Any, Path], random_prompts: Any, phase: str
) -> None:
    system, victim, flag = hanging
    prompts = random_prompts((30, 90, 200) * 2, vocab_size=256, seed=31)
    expected = system.generate(prompts, max_tokens=600)
    why = rf"decode worker {victim.name} sent no token for [\d.]+ s in the {phase} phase"
    for number in range(TRIES):
        if phase == "prefill":
            flag.touch()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(system.generate, prompts, max_tokens=600, cache_salt=f"{phase} {number}")
            if phase == "decode":
                while not (asked.done() or runs_some(victim)):  # the other may look better for all: then again
                    time.sleep(0.02)
                flag.touch()
            assert asked.result(PATIENCE_S) == expected
        if re.search(why, system.stack.router.log.read_text()):
            break
        flag.unlink()
        assert system.generate(prompts, max_tokens=600, cache_salt=f"quick again {number}") == expected
    else:
        pytest.fail("the other worker took every request")
    assert {worker["state"] for worker in load(system.stack)["workers"]} == {"ready"}


# ---------------------------------------------------------------- a router that is told to end


def test_a_router_that_ends_cuts_what_takes_too_long(system_of: Any) -> None:
    flags = ("--drain-timeout-s", str(DRAIN_S), *BLIND)
    stack = system_of(router_flags=flags, worker_flags=NEVER_STUCK).stack
    (decode,) = stack.workers("decode")
    wait_until_all_ready(stack)
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, stack, stream=stream) for stream in (False, True)]
            wait_for_stage(stack, "decode", 2)
            decode.pause()
            stack.router.terminate()
            wait_until(lambda: is_ending(stack), "/ready says so")
            (status, error), (stream_status, stream_error) = (one.result() for one in asked)
    finally:
        decode.resume()
    stack.router.wait(time.monotonic() + PATIENCE_S)
    assert (status, stream_status) == (503, 200)
    assert stream_error == error and "shutting down" in error["message"]
    assert (stack.router.returncode, stack.router.forced) == (0, False)
    wait_until(lambda: not any(owned(stack).values()), "the workers dropped its requests", PATIENCE_S)


# ---------------------------------------------------------------- a prefill worker


def test_a_prefill_worker_that_sends_no_token_loses_its_requests(
    system_of: Any, random_prompts: Any, tmp_path: Path
) -> None:
    timeouts = ("--prefill-timeout-s", str(TIMEOUT_S))
    system, flag = system_of(2, 1, router_flags=(*timeouts, *BLIND), worker_flags=NEVER_STUCK), tmp_path / "hang"
    victim = system.stack.workers("prefill")[1]
    prompts = random_prompts((30, 90, 200) * 2, vocab_size=256, seed=32)
    with faulty(system.stack, victim, hang=flag):
        wait_until_all_ready(system.stack)
        expected = system.generate(prompts, max_tokens=20)
        flag.touch()
        assert system.generate(prompts, max_tokens=20, cache_salt="hangs") == expected
        why = rf"prefill worker {victim.name} sent no token for [\d.]+ s in the prefill phase"
        assert re.search(why, system.stack.router.log.read_text())
    wait_until_all_ready(system.stack)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prompt_that_takes_longer_than_the_deadline_is_computed_once(
    system_of: Any, random_prompts: Any, tmp_path: Path, role: str
) -> None:
    """The worker reports progress of its slow steps, so the router starts the prompt nowhere else."""
    num_prefill = 1 if role == "prefill" else 0
    flags = ("--prefill-timeout-s", str(TIMEOUT_S), *BLIND)
    steps = ("--max-num-batched-tokens", "256") if num_prefill else ()
    system, flag = (
        system_of(num_prefill, 1, router_flags=flags, worker_flags=NEVER_STUCK, prefill_flags=steps),
        tmp_path / "slow",
    )
    victim = system.stack.workers(role)[0]
    prompts = random_prompts((2500,), vocab_size=256, seed=34)
    with faulty(system.stack, victim, hang=flag):
        wait_until_all_ready(system.stack)
        expected = system.generate(prompts, max_tokens=10)
        flag.write_text("0.6" if num_prefill else "0.3")
        assert system.generate(prompts, max_tokens=10, cache_salt="slow") == expected
        assert ": retrying:" not in system.stack.router.log.read_text()
    wait_until_all_ready(system.stack)


# ---------------------------------------------------------------- room


def test_a_request_that_gets_no_room_goes_elsewhere(system_of: Any, random_prompts: Any, tmp_path: Path) -> None:
    """Two prompts do not fit on one decode worker: the second waits for the first, on one of two for long."""
    limits = ("--num-blocks", "256", "--block-size", "16", "--grant-timeout-s", str(TIMEOUT_S))
    system = system_of(1, 2, router_flags=BLIND, worker_flags=NEVER_STUCK, decode_flags=limits)
    victim, flag = system.stack.workers("decode")[1], tmp_path / "slow"
    prompts = random_prompts((3000,) * 8, vocab_size=256, seed=33)
    with faulty(system.stack, victim, hang=flag):
        wait_until_all_ready(system.stack)
        expected = system.generate(prompts, max_tokens=30)
        for number in range(TRIES):
            flag.write_text("0.4")  # an answer takes 12 s there: on a busy machine prompts may come more slowly
            assert system.generate(prompts, max_tokens=30, cache_salt=f"slow {number}") == expected
            if f"no free KV blocks for 3000 tokens within {TIMEOUT_S:g} s" in system.stack.router.log.read_text():
                break
            flag.unlink()  # the router knows by now that it is slow: let it see that it is quick again
            assert system.generate(prompts, max_tokens=30, cache_salt=f"quick {number}") == expected
        else:
            pytest.fail("every prompt found room at once")
    wait_until_all_ready(system.stack)


# ---------------------------------------------------------------- a client that does not read


@pytest.mark.slow
def test_a_client_that_does_not_read_is_left(system_of: Any) -> None:
    """Megabytes fit between the two ends of its connection: so long an answer takes seconds on a busy machine."""
    stack = system_of(router_flags=("--request-timeout-s", str(4 * REQUEST_TIMEOUT_S))).stack
    fields = {"prompt": "x" * 40, "max_tokens": 3500, "n": 8, "logprobs": 20, "ignore_eos": True, "stream": True}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little fits on the way
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", stack.port))
        body = json.dumps({"model": MODEL, **fields}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}"
        )
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        wait_until(lambda: any(owned(stack).values()), "it runs")
        wait_until(lambda: not any(owned(stack).values()), "the workers are rid of it", PATIENCE_S)
        with httpx.Client(base_url=stack.url, timeout=PATIENCE_S, trust_env=False) as other:
            complete(other, prompt="x", max_tokens=5)  # nobody else waits for that
        said = "The client did not read its answer in time."
        wait_until(lambda: said in stack.router.log.read_text(), "the router gave up", PATIENCE_S)
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 16):
                received += part
    assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
