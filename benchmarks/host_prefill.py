"""The host's part of a step of prompts, the device's work left out: `python -m benchmarks.host_prefill`.

A real engine, scheduler, runner and sampler over a model that computes nothing. So a step's time is what the host takes
to schedule it, fill its inputs and process what it made; the launches of a model's kernels come on top. A prefill
worker on a GPU does all that while the step before runs, so this is the time that a step no longer takes. Prints
medians over steps, in milliseconds of processor time, which other programs on the machine prolong less than time.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

import torch
import zmq

from benchmarks.host_step import BLOCK_SIZE, VOCAB, NoModel
from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, write_result
from common.kv.block_pool import BlockPool
from common.kv.cache import KVCache
from common.runner.runner import ModelRunner
from common.sampling import sampler as sampler_module
from common.sampling.sampler import Sampler
from common.transfer.sender import KVSender
from common.transfer.shipping import Shipping
from common.wire.message_fields import pack_tokens
from common.wire.messages import PrefillRequest
from common.wire.sampling_params import SamplingParams
from common.worker.engine import EngineConfig, RequestReceived
from common.worker.metrics import WorkerMetrics
from prefill_worker.engine import PrefillEngine
from prefill_worker.launcher import PromptLauncher
from prefill_worker.scheduler import PrefillScheduler

PROGRAM: Final = "python -m benchmarks.host_prefill"
STEP = 8192


class Host:
    """An engine that computes prompts of `length` tokens, as many in a step as it takes."""

    def __init__(self, length: int) -> None:
        self._length, self._num_asked = length, 0
        self.per_step = max(1, STEP // length)
        num_blocks = 4 * self.per_step * -(-length // BLOCK_SIZE)
        model = NoModel(length + 1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        kv, identity = KVCache(model.config, num_blocks, BLOCK_SIZE, "float32"), ("p", 1)
        sender = KVSender(
            self._context, Shipping(kv.block), kv.block_bytes, (*identity, ""), lambda event: None,
            lease_s=9.0, num_streams=1,
        )  # fmt: skip
        sender.start()
        self.engine = PrefillEngine(
            lambda messages: None,
            EngineConfig(identity=identity, eos_token_ids=(), max_model_len=10**6, max_waiting=10**6),
            PrefillScheduler(
                BlockPool(num_blocks, BLOCK_SIZE), max_num_batched_tokens=STEP, max_num_seqs=2 * self.per_step
            ),
            PromptLauncher(ModelRunner(model, kv), Sampler(VOCAB)),
            sender,
            WorkerMetrics("m", "p", lambda: self.engine.status),
        )

    def step_ms(self, num_steps: int) -> list[float]:
        """Of full steps, each of prompts that nothing is cached of."""
        found = []
        for _ in range(num_steps):
            self._ask(self.per_step)
            began = time.process_time()
            self.engine.step(time.monotonic())
            assert self.engine.is_empty, "one step computes them all"
            found.append((time.process_time() - began) * 1e3)
        return found

    def _ask(self, count: int) -> None:
        for _ in range(count):
            self._num_asked += 1
            tokens = [(self._num_asked * 31 + place * 7) % VOCAB for place in range(self._length)]
            request = PrefillRequest(
                request_id=f"r{self._num_asked}", attempt=0, prompt=pack_tokens(tokens), deadline_s=3600.0,
                params=SamplingParams(max_tokens=1, temperature=0.0),
            )  # fmt: skip
            self.engine.apply(RequestReceived(b"router", request))

    def close(self) -> None:
        self.engine.close()  # ends the sender's thread
        self._context.destroy(linger=0)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048, 8192], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="timed, of each length")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    ids = torch.full((STEP,), 7)
    vars(sampler_module)["sample"] = lambda logits, *_: ids[: len(logits)].clone()
    found: dict[str, float] = {}
    for length in options.lengths:
        host = Host(length)
        try:
            found[f"{host.per_step} x {length}"] = round(statistics.median(host.step_ms(options.steps)), 2)
        finally:
            host.close()
    title = f"the host's part of a prefill step of {STEP:,} tokens"
    print_table(open_console(), title, ("prompts", "ms"), [(kind, f"{ms:.2f}") for kind, ms in found.items()])
    write_result(options, PROGRAM, argv, {"ms": found})
    return 0


if __name__ == "__main__":
    run(main)
