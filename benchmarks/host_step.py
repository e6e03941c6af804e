"""The host's part of a decode step of many sequences, the device's work left out: `python -m benchmarks.host_step`.

A real engine, scheduler, graph runner and sampler; what they would launch on a GPU does nothing, and every sampled
token is the same. So a step's time is what the host takes to schedule it, fill its inputs and process its tokens: on a
GPU a step cannot be shorter. Prints medians over steps, in milliseconds of processor time, which other programs on the
machine prolong less than time.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import zmq
from torch import Tensor

from benchmarks.load.report import open_console, print_table
from benchmarks.script import run, script_parser, write_result
from common.kv.block_pool import BlockPool
from common.kv.cache import KVCache
from common.model.batch import ForwardBatch
from common.model_config.rope import RopeConfig
from common.model_files.config import ModelConfig
from common.runner.graph_runner import GraphRunner
from common.runner.step_launcher import StepLauncher
from common.sampling import sampler as sampler_module
from common.sampling.sampler import Sampler
from common.transfer.receiver import KVReceiver
from common.transfer.sender import KVSender
from common.transfer.shipping import Shipping
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest
from common.wire.sampling_params import SamplingParams
from common.worker.engine import EngineConfig, RequestReceived
from common.worker.metrics import WorkerMetrics
from decode_worker.engine import DecodeEngine
from decode_worker.grants import IncomingTransfers, TransferEnds
from decode_worker.limits import DecodeLimits
from decode_worker.pipeline import DecodeModel
from decode_worker.scheduler import DecodeScheduler

PROGRAM: Final = "python -m benchmarks.host_step"
VOCAB, BLOCK_SIZE, CHUNK = 32_000, 64, 8192
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5},
}


class NoModel:
    """Its steps launch nothing."""

    dtype, device, quantization = torch.float32, torch.device("cpu"), "none"

    def __init__(self, max_model_len: int) -> None:
        self.config = ModelConfig(
            family="llama", model_type="llama", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16,
            hidden_size=16, intermediate_size=16, vocab_size=VOCAB, max_model_len=max_model_len, rms_norm_eps=1e-5,
            layer_windows=(0,), layer_ropes=(RopeConfig(10_000.0),), attention_scale=0.25,
        )  # fmt: skip

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        count = batch.num_tokens if batch.sampled is None else len(batch.sampled)
        return torch.zeros(count, VOCAB)


class NoRecorder:
    """Its replays do nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class Host:
    """An engine with `count` sequences of `context` tokens that decode."""

    def __init__(self, count: int, context: int, params: SamplingParams) -> None:
        num_blocks = count * (-(-(context + params.max_tokens) // BLOCK_SIZE) + 1)
        model = NoModel(context + params.max_tokens + 1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        kv, sampler = KVCache(model.config, num_blocks, BLOCK_SIZE, "float32"), Sampler(VOCAB)
        runner = GraphRunner(model, kv, NoRecorder(), max_num_seqs=count, max_model_len=model.config.max_model_len)
        identity = ("d", 1)
        self._receiver = KVReceiver(self._context, "127.0.0.1", 0, kv.block, lambda event: None)
        self._sender = KVSender(
            self._context,
            Shipping(kv.block),
            kv.block_bytes,
            (*identity, ""),
            lambda event: None,
            lease_s=9.0,
            num_streams=1,
        )
        self._receiver.start()
        self._sender.start()
        self.engine = DecodeEngine(
            lambda messages: None,
            EngineConfig(identity=identity, eos_token_ids=(), max_model_len=10**6, max_waiting=count),
            DecodeLimits(grant_timeout_s=9.0, transfer_timeout_s=9.0, handover_timeout_s=9.0),
            DecodeScheduler(
                BlockPool(num_blocks, BLOCK_SIZE), max_num_seqs=count, local_prefill_chunk=CHUNK, watermark=0.0
            ),
            DecodeModel(runner, sampler, StepLauncher(runner, sampler)),
            TransferEnds(IncomingTransfers(self._receiver, epoch=1, fingerprint=""), self._sender),
            WorkerMetrics("m", "d", lambda: self.engine.status),
        )
        for number in range(count):
            tokens = [(number * 31 + place * 7) % VOCAB for place in range(context)]
            request = DecodeRequest(
                request_id=f"r{number}", attempt=0, prompt=pack_tokens(tokens), params=params, prefill_worker="",
                num_output_tokens=0, deadline_s=3600.0,
            )  # fmt: skip
            self.engine.apply(RequestReceived(b"router", request))

    def step_ms(self, num_steps: int) -> list[float]:
        """Of decode steps, all prompts being computed."""
        scheduler = self.engine.scheduler
        while scheduler.num_waiting or any(not each.has_first_token for each in scheduler.running):
            self.engine.step(time.monotonic())
        found = []
        for _ in range(num_steps):
            began = time.process_time()
            self.engine.step(time.monotonic())
            found.append((time.process_time() - began) * 1e3)
        return found

    def close(self) -> None:
        self.engine.close()  # ends the threads of both
        self._context.destroy(linger=0)


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    parser.add_argument("--sequences", type=int, default=256, help="that decode side by side")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="timed, of each kind of sampling")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS], help="how all rows sample")
    return parser.parse_args(argv)


def measure(options: Namespace, kind: str) -> float:
    """Median milliseconds of a step."""
    params = SamplingParams(max_tokens=4 * options.steps + 64, ignore_eos=True, **KINDS[kind])
    host = Host(options.sequences, options.context, params)
    try:
        return statistics.median(host.step_ms(options.steps))
    finally:
        host.close()


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    ids = torch.full((options.sequences,), 7)
    vars(sampler_module)["sample"] = lambda logits, *_: ids[: len(logits)].clone()
    found = {kind: round(measure(options, kind), 3) for kind in options.kinds}
    title = f"the host's part of a step of {options.sequences} sequences of {options.context:,} tokens"
    print_table(open_console(), title, ("kind", "ms"), [(kind, f"{ms:.2f}") for kind, ms in found.items()])
    write_result(options, PROGRAM, argv, {"ms": found})
    return 0


if __name__ == "__main__":
    run(main)
