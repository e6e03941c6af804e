"""Sends one request to a running release and checks that both the prefill and the decode pool processed it.

For a model that embeds or scores, which uses no decode pool, an answer suffices.
Uses only the standard library. Exits with status 0 on success, else with 1 and the reason.
"""

import argparse
import json
import os
import secrets
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request

HANDED_OVER = "diptych_kv_transfers_total"
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "lagoon")
NUM_WORDS = 400
POLL_S = 2.0
RETRIED = (408, 429)
"""Statuses below 500 that a later attempt may not get."""


def fetch(url: str, body: object = None) -> tuple[int, str]:
    """Send a GET, or a POST if there is a body. Return (status, text), or (0, reason) without a response."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get("API_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    data = None if body is None else json.dumps(body).encode()
    context = ssl._create_unverified_context() if url.startswith("https") else None  # inside the cluster, by name
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=60, context=context) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def workers_of(services: list[str]) -> list[str]:
    """Return HOST:PORT of every pod of the headless services."""
    found: set[str] = set()
    for service in services:
        name, _, port = service.rpartition(":")
        try:
            entries = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue  # a pool without pods has no address
        for family, _, _, _, address in entries:
            host = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            found.add(f"{host}:{port}")
    return sorted(found)


def handed_over(services: list[str]) -> dict[str, float]:
    """Return {worker: number of prompts whose KV it sent or received}."""
    counts: dict[str, float] = {}
    for worker in workers_of(services):
        status, text = fetch(f"http://{worker}/metrics")
        if status == 200:
            lines = [line for line in text.splitlines() if line.startswith(HANDED_OVER + "{")]
            counts[worker] = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return counts


def grown(before: dict[str, float], after: dict[str, float]) -> bool:
    return sum(after.values()) > sum(count for worker, count in before.items() if worker in after)


def ask(options: argparse.Namespace, words: list[str]) -> tuple[str, int, str]:
    """Send the request of the model's task. Return (path, status, text).

    The prompt is in no cache and too long for the decode worker's own prefill.
    """
    prompt = "Repeat the first word of this list. " + " ".join(words)
    requests = {
        "/v1/completions": {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True},
        "/v1/embeddings": {"input": prompt},
        "/v1/score": {"text_1": words[0], "text_2": prompt},
    }
    for path, body in requests.items():
        status, text = fetch(options.url + path, {"model": options.model, **body})
        if not has_other_task(status, text):
            break
    return path, status, text


def has_other_task(status: int, text: str) -> bool:
    """Return whether the endpoint is not for the task of this model: the router then names the parameter `model`."""
    return status == 400 and '"param":"model"' in text.replace(" ", "")


def check(options: argparse.Namespace) -> str:
    """Return "" if the request went through both pools, else the reason. Exits if it would fail again."""
    before = {role: handed_over(getattr(options, role)) for role in ("prefill", "decode")}
    words = [secrets.choice(WORDS) + str(secrets.randbelow(1000)) for _ in range(NUM_WORDS)]
    path, status, text = ask(options, words)
    while status == 400 and "context_length_exceeded" in text and len(words) > 40:
        words = words[: len(words) // 2]
        path, status, text = ask(options, words)
    if status in (401, 403):
        given = "the one of test.apiKeySecret" if os.environ.get("API_KEY") else "none: set test.apiKeySecret"
        raise SystemExit(f"the router answered {status}: it requires an API key, and this test has {given}")
    if 400 <= status < 500 and status not in RETRIED:
        raise SystemExit(f"the router answered {status}: {text[:300]}")
    if status != 200:
        return f"the router answered {status}: {text[:300]}" if status else f"no response from the router: {text[:300]}"
    if path != "/v1/completions":
        print(f"answered {path}; this model does not generate text")
        return ""
    answer = json.loads(text)
    if not answer["usage"]["completion_tokens"]:
        return "the response has no tokens: " + text[:300]
    if not options.prefill:
        print("answered; this model has no prefill pool")
        return ""
    deadline = time.monotonic() + min(20.0, options.timeout_s)
    while True:  # workers count a transfer slightly after the client has its response
        after = {role: handed_over(getattr(options, role)) for role in before}
        missing = [role for role in before if not grown(before[role], after[role])]
        if not missing:
            print("answered through both pools:", text[:300])
            return ""
        if time.monotonic() > deadline:
            return f"answered, but no {' and no '.join(missing)} worker counted a transfer: {after}"
        time.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefill", action="append", default=[], help="HOST:PORT of a pool's metrics")
    parser.add_argument("--decode", action="append", default=[])
    parser.add_argument("--timeout-s", type=float, default=300)
    options = parser.parse_args()
    deadline = time.monotonic() + options.timeout_s
    while True:
        reason = check(options)
        if not reason:
            return 0
        print(reason, flush=True)
        if time.monotonic() > deadline:
            return 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
