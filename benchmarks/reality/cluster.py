"""The real side: a cluster of paced workers, what it takes at idle, and how a load fares."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import uvloop
import zmq

from benchmarks.load.client import CompletionClient, RequestOptions
from benchmarks.load.load import Load
from benchmarks.load.summary import RequestRecord
from benchmarks.load.trace import TraceRow
from benchmarks.load.workload import Prompt, RequestPlan
from benchmarks.paced.coefficients import StepCoefficients
from benchmarks.paced.stack import MODEL, PacedStack
from benchmarks.reality.loads import MAX_MODEL_LEN, NUM_BLOCKS, STEP_TOKENS, Case, workload_of
from benchmarks.reality.numbers import Fate
from benchmarks.stack import StackProcess, StackSettings
from common.wire.codec import decode, encode
from common.wire.messages import RouterHello, WorkerHello

REQUEST_TIMEOUT_S: Final = 120.0
NUM_PINGS, PING_TIMEOUT_MS = 40, 2000
WARM_UP_EACH: Final = 8
"""Requests for each worker before anything is measured, so that its model of its steps is settled."""
FORGET_S: Final = 1.0
"""For workers and routers to forget what was cached: a few heartbeats."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """What clients saw, and how the machine fared: load averages before and after, lateness of the load generator."""

    fates: Sequence[Fate]
    load_average: tuple[float, float]
    late_p99_ms: float
    cpu_s: float


class SpreadClient:
    """Sends the request with index i to the i-th router in turn, as simulated clients do."""

    def __init__(self, urls: Sequence[str]) -> None:
        options = RequestOptions(MODEL, timeout_s=REQUEST_TIMEOUT_S)
        self._clients = [CompletionClient(url, options) for url in urls]

    def body(self, prompt: Prompt, output_len: int) -> bytes:
        return self._clients[0].body(prompt, output_len)

    async def complete(self, plan: RequestPlan, record: RequestRecord, body: bytes | None = None) -> None:
        await self._clients[plan.index % len(self._clients)].complete(plan, record, body)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class Cluster(PacedStack):
    """The cluster of a case, with routers for each of `policies`. Raises StackError as `Stack`."""

    def __init__(self, case: Case, policies: Sequence[str], pace_file: Path, seed: int, log_dir: Path | None) -> None:
        self.case, self._policies, self._seed = case, policies, seed
        self._num_built = 0
        goals = ("--slo-ttft-ms", f"{case.ttft_ms:g}", "--slo-tpot-ms", f"{case.tpot_ms:g}")
        settings = StackSettings(
            case.prefill,
            case.decode,
            routers=case.routers * len(policies),
            worker_flags=("--num-blocks", str(NUM_BLOCKS)),
            prefill_flags=("--max-num-batched-tokens", str(STEP_TOKENS)),
            decode_flags=("--max-draft-tokens", "0", "--slo-tpot-ms", f"{case.tpot_ms:g}"),
            router_flags=goals,
            log_dir=log_dir,
        )
        super().__init__(settings, coefficients=pace_file, max_model_len=MAX_MODEL_LEN)

    def _router(self, index: int, flags: Sequence[str]) -> StackProcess:
        router = super()._router(index, flags)
        policy, number = self._policies[index // self.case.routers], index % self.case.routers
        start = router.command.index("router")
        seed = f"{self._seed}/policy/{number}"
        router.command[start : start + 1] = ["benchmarks.reality.router", policy, seed]
        return router

    def urls(self, policy: str) -> list[str]:
        """Of the routers with this policy."""
        first = self._policies.index(policy) * self.case.routers
        return [router.http_url for router in self.routers[first : first + self.case.routers]]

    # ------------------------------------------------------------ at idle

    def message_s(self) -> float:
        """How long a message takes between a router and a worker, one way: half of a hello and its answer, at idle."""
        address = self.workers("prefill")[0].addresses["address"]
        hello = encode(RouterHello(router_id=secrets.token_hex(8), epoch=1))
        took_s = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(address)
            for _ in range(NUM_PINGS):
                began = time.perf_counter()
                socket.send(hello)
                _wait_for_hello(socket)
                took_s.append(time.perf_counter() - began)
                time.sleep(0.02)
        return statistics.median(took_s) / 2

    def warm_up(self, policy: str) -> None:
        """Give each worker some work, so that it knows how long its steps take.

        One prompt in three is so short that its decode worker computes it.
        """
        num = WARM_UP_EACH * (self.case.prefill + self.case.decode)
        lengths = ((20 + 41 * number % 44) if number % 3 == 0 else (150 + 97 * number % 900) for number in range(num))
        rows = [TraceRow(number * 0.02, length, 16) for number, length in enumerate(lengths)]
        self.replay(rows, policy, seed=-1)

    def alone(self, rows: Sequence[TraceRow], policy: str) -> list[Fate]:
        """What becomes of requests of these lengths, one after the other. The cache holds nothing of them."""
        return self._run(rows, policy, 512, -2, lambda load: load.closed_loop(1))[0]

    # ------------------------------------------------------------ under load

    def replay(self, rows: Sequence[TraceRow], policy: str, *, id_tokens: int = 512, seed: int) -> RealRun:
        """Send the rows' requests when they are due."""
        before, cpu_before = os.getloadavg()[0], time.process_time()
        arrivals = [row.arrival_s for row in rows]
        fates, late_s = self._run(rows, policy, id_tokens, seed, lambda load: load.open_loop(arrivals))
        late_ms = sorted(1000 * late for late in late_s)[int(0.99 * (len(late_s) - 1))]
        return RealRun(fates, (before, os.getloadavg()[0]), late_ms, time.process_time() - cpu_before)

    def forget_prefixes(self) -> None:
        """Empty every prefix cache."""
        for router in self.routers:
            httpx.post(router.http_url + "/reset_prefix_cache", timeout=10.0, trust_env=False).raise_for_status()
        time.sleep(FORGET_S)

    def fitted(self, role: str) -> StepCoefficients:
        """The mean of what the workers of a role say of their steps."""
        answer = httpx.get(self.url + "/load", timeout=10.0, trust_env=False).raise_for_status().json()
        models = [worker["step_model"] for worker in answer["workers"] if worker["role"] == role]
        names = [name for name in StepCoefficients.__struct_fields__ if name != "num_steps"]
        means: dict[str, Any] = {name: statistics.fmean(model[name] for model in models) for name in names}
        return msgspec.convert(means, StepCoefficients)

    def _run(
        self,
        rows: Sequence[TraceRow],
        policy: str,
        id_tokens: int,
        seed: int,
        drive: Callable[[Load], Any],
    ) -> tuple[list[Fate], list[float]]:
        workload, urls = workload_of(rows, id_tokens, seed), self.urls(policy)

        async def run() -> tuple[list[Fate], list[float]]:
            client = SpreadClient(urls)
            load = Load(client, workload, num_requests=len(rows))
            began = time.perf_counter()
            try:
                async with asyncio.timeout(rows[-1].arrival_s + 10 * REQUEST_TIMEOUT_S):
                    await drive(load)
            finally:
                await client.close()
            return [Fate.of_record(record, began) for record in load.records], [r.late_s for r in load.records]

        return uvloop.run(run())


def _wait_for_hello(socket: zmq.Socket[bytes]) -> None:
    while socket.poll(PING_TIMEOUT_MS):
        if isinstance(decode(socket.recv()), WorkerHello):
            return
    raise TimeoutError(f"a worker did not answer a hello within {PING_TIMEOUT_MS} ms")
