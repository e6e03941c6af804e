"""How long the router takes to choose the workers of a request: `python -m benchmarks.decisions`.

A registry of workers that report different loads and slightly different models of their steps, half of them prefill
workers, and an index in which some of them hold the beginnings of prompts. Between two decisions workers report, as
often as at `--rate` decisions a second, and each chosen worker is booked. Prints microseconds of processor time,
which other programs on the machine prolong less than time:

    decision   look up the prompt's blocks, make the shortlist, choose; what a request waits for
    choose     of that, the policy alone
    all        the policy when it weighs every ready worker
    report     a heartbeat, with the new place in the ranking
    hash       of the prompt's blocks, once a prompt
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from common.kv.block_hash import block_hashes
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import WorkerHeartbeat, WorkerHello
from common.wire.sampling_params import SamplingParams
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker
from router.garbage import collect_seldom
from router.placement.placement import Placement
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy
from router.streams.client import GenerationRequest
from router.streams.request_state import RequestState

T = TypeVar("T")
BLOCK_SIZE = 16
HEARTBEAT_S = 0.25
OUTPUT_TOKENS = 200


class Cluster:
    """The state that a router has of `num_workers` workers. Nothing is sent."""

    def __init__(self, num_workers: int, seed: int) -> None:
        half = num_workers // 2
        prefill, decode = [f"p{i}" for i in range(half)], [f"d{i}" for i in range(num_workers - half)]
        self.rng = random.Random(seed)
        self.registry = WorkerRegistry(prefill, decode, worker_timeout_s=1.0, router_id="benchmark")
        self.index, self.policy = PrefixIndex(), RoutingPolicy()
        self.placement = Placement(self.registry, self.policy, self.index, lambda *_: True, lambda *_: None)
        self.now = 0.0
        for worker in self.registry.workers.values():
            self.registry.on_hello(worker.address, _hello(worker), 0.0)
        self.beats = {worker.address: self._beat(worker) for worker in self.registry.workers.values()}
        for address in self.beats:
            self.report(address)

    def _beat(self, worker: Worker) -> WorkerHeartbeat:
        rng, faster = self.rng, 1.0 + 0.2 * self.rng.random()
        is_decode = worker.role == "decode"
        num_running = rng.randrange(40) if is_decode else 1
        model = StepModel(
            fixed_s=5e-3 * faster, token_s=4e-5 * faster, pair_s=2e-10, row_s=5e-5, context_s=3e-8, error=0.05,
            num_steps=1000,
        )  # fmt: skip
        return WorkerHeartbeat(
            worker_id=worker.address, epoch=1, step=1, ready=True, draining=False, num_running=num_running,
            num_waiting=0, num_transferring=0, num_waiting_tokens=0, num_free_blocks=15_000, num_cached_blocks=4_000,
            num_owned_blocks=1_000, waiting_s=0.0 if is_decode else 0.2 * rng.random(),
            num_context_tokens=1000 * num_running, step_model=model,
        )  # fmt: skip

    def report(self, address: str) -> None:
        """The worker's next heartbeat, which counts all that was booked and has a little more or less to do."""
        beat = self.beats[address]
        waiting_s = beat.waiting_s * (0.8 + 0.4 * self.rng.random())
        beat = msgspec.structs.replace(beat, step=beat.step + 1, waiting_s=waiting_s, serial=self.registry.next_serial)
        self.beats[address] = beat
        self.registry.on_heartbeat(address, beat, self.now)

    def hold(self, prompt: Sequence[int], addresses: Sequence[str], num_blocks: int) -> None:
        """These workers hold the first blocks of the prompt."""
        for address in addresses:
            shorts = [digest[:8] for digest in block_hashes(prompt, BLOCK_SIZE)[:num_blocks]]
            self.index.store(address, shorts)


def _hello(worker: Worker) -> WorkerHello:
    return WorkerHello(
        worker_id=worker.address, role=worker.role, epoch=1, fingerprint="layout", model="m", block_size=BLOCK_SIZE,
        num_blocks=20_000, max_model_len=32_768, max_num_seqs=256, max_step_tokens=2048,
    )  # fmt: skip


def measure(num_workers: int, prompt_tokens: int, hit_blocks: int, num_holders: int, num: int, rate: float) -> str:
    """One row of the table: the times of `num` decisions."""
    cluster = Cluster(num_workers, seed=num_workers)
    rng, addresses = random.Random(1), list(cluster.registry.workers)
    shared = [rng.randrange(50_000) for _ in range(prompt_tokens)]
    cluster.hold(shared, rng.sample(addresses, min(num_holders, num_workers)), hit_blocks)
    head = shared[: hit_blocks * BLOCK_SIZE]
    times: dict[str, list[float]] = {name: [] for name in ("decision", "choose", "all", "report", "hash")}
    turn = 0
    for number in range(num):
        cluster.now += 1 / rate
        for _ in range(max(1, round(num_workers / HEARTBEAT_S / rate))):
            address = addresses[turn % num_workers]
            turn += 1
            _timed(times["report"], lambda a=address: cluster.report(a))  # type: ignore[misc]
        prompt = head + [rng.randrange(50_000) for _ in range(prompt_tokens - len(head))]
        state = RequestState(_request(number, prompt), cluster.now)
        _timed(times["hash"], lambda s=state: s.hashes(BLOCK_SIZE))  # type: ignore[misc]
        chosen = _timed(times["decision"], lambda s=state: cluster.placement.choose(s, cluster.now))  # type: ignore[misc]
        assert chosen is not None
        _measure_policy(cluster, state, chosen[1], times, weigh_all=number % 50 == 0)
        for worker in (chosen[0].prefill, chosen[0].decode):
            if worker is not None:
                cluster.registry.book(worker.address, 0.0, prompt=StepShape.of_prompt(0, prompt_tokens), num_blocks=250)
    cells = [
        f"{statistics.median(found):8.0f} {sorted(found)[int(0.99 * len(found))]:6.0f}" for found in times.values()
    ]
    return f"{num_workers:7d} {prompt_tokens:7d} {hit_blocks:5d} {num_holders:7d} " + " ".join(cells)


def _measure_policy(
    cluster: Cluster, state: RequestState, shape: RequestShape, times: dict[str, list[float]], *, weigh_all: bool
) -> None:
    """The policy's own time, among the shortlisted workers and among all."""
    prefill, decode = cluster.placement.candidates.of(state, (), cluster.placement.candidates.hits(state))
    _timed(times["choose"], lambda: cluster.policy.choose(prefill, decode, shape, cluster.now))
    if weigh_all:
        prefill, decode = cluster.registry.ready("prefill"), cluster.registry.ready("decode")
        _timed(times["all"], lambda: cluster.policy.choose(prefill, decode, shape, cluster.now))


def _request(number: int, prompt: list[int]) -> GenerationRequest:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    return GenerationRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params, deadline_s=600.0)


def _timed(times: list[float], call: Callable[[], T]) -> T:
    began = time.thread_time()
    result = call()
    times.append(1e6 * (time.thread_time() - began))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 200, 1000])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[4000])
    parser.add_argument("--hit-blocks", type=int, default=32, help="leading blocks that some workers hold")
    parser.add_argument("--holders", type=int, nargs="+", default=[10, 500], help="how many workers hold them")
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=200.0, help="decisions a second; heartbeats come as often")
    options = parser.parse_args()
    collect_seldom()
    names = "".join(f" {name:>8s}    p99" for name in ("decision", "choose", "all", "report", "hash"))
    print(f"workers  prompt  hits holders{names}   (median and p99, microseconds)")
    for num_workers in options.workers:
        for prompt_tokens in options.prompt_tokens:
            for num_holders in options.holders:
                sizes = (num_workers, prompt_tokens, options.hit_blocks, num_holders)
                print(measure(*sizes, options.decisions, options.rate), flush=True)


if __name__ == "__main__":
    main()
