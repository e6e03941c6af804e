"""A router with a prefill and a decode worker for each of two models, as real processes, and how tests ask it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from benchmarks.stack import Stack, StackProcess, StackSettings

NUM_TOKENS = 12
DEADLINE_S = 120.0


class TwoModels:
    """The models are `first` and `second`. `headers` go with each request."""

    def __init__(self, stack: Stack, folders: dict[str, Path], headers: dict[str, str] | None = None) -> None:
        self.stack, self.folders = stack, folders
        self.http = httpx.Client(base_url=stack.url, timeout=DEADLINE_S, trust_env=False, headers=headers)

    def workers(self, model: str) -> list[StackProcess]:
        return [one for one in self.stack.workers() if str(self.folders[model]) in one.command]

    def ask(self, model: str, prompt: list[int], **headers: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)

    def tokens(self, model: str, prompt: list[int]) -> list[int]:
        reply = self.ask(model, prompt)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        return list(reply.json()["choices"][0]["token_ids"])

    def wait_ready(self, model: str, status: int = 200) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.http.get(f"/ready?model={model}").status_code != status:
            assert time.monotonic() < deadline, self.stack.router.log_tail()
            time.sleep(0.05)

    def wait_for_workers(self) -> None:
        """Until every worker serves: a router is ready with decode workers alone."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            states = [worker["state"] for worker in self.http.get("/load").json()["workers"]]
            if states == ["ready"] * len(self.stack.workers()):
                return
            assert time.monotonic() < deadline, (states, self.stack.router.log_tail())
            time.sleep(0.05)


def stack_of_two(folders: dict[str, Path], router_flags: tuple[str, ...], log_dir: Path) -> Stack:
    """Workers `prefill-0` and `decode-0` of the first model, `prefill-1` and `decode-1` of the second."""
    first, second = (str(folder) for folder in folders.values())
    stack = Stack(
        StackSettings(
            2,
            2,
            model=first,
            worker_flags=("--kv-memory-gib", "0.05", "--threads", "1"),
            router_flags=(*router_flags, "--local-prefill-threshold", "0", "--queue-timeout-s", "90"),
            log_dir=log_dir,
            ready_timeout_s=DEADLINE_S,
        )
    )
    for worker in stack.workers():
        if worker.name.endswith("-1"):
            worker.command[worker.command.index(first)] = second
    router = stack.router.command  # `router_flags` name a file of both models
    del router[router.index("--model") : router.index("--model") + 2]
    return stack
