"""`diptych size`: estimate the number of workers for a load, as a starting point for tuning.

Prefill: a prompt takes 2 x parameters x uncached tokens FLOPs. Workers are M/D/1 queues, whose mean wait is
u t / (2 (1 - u)) at utilization u (DistServe, section 3.1).
Decode: a step reads the weights and the KV of its batch, or computes 2 x parameters x batch FLOPs, whichever takes
longer. The batch is the largest that meets the TPOT goal and fits into memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.arguments import CommandParser, number
from common.errors import ModelError
from common.model_files import from_hf

QUEUE_SHARE = 0.65
"""Share of the time left by the TTFT goal for the mean wait. The rest is for longer waits."""
TPOT_SHARE, MAX_UTILISATION, MEMORY_SHARE = 0.9, 0.9, 0.9
"""Usable shares of the TPOT goal, of the time of a worker, and of the memory."""


class Infeasible(Exception):
    """No number of workers meets the goals. The message names the goal and the limit."""


@dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    `kv_bytes` is the KV of one token over all layers. `window` is the attention window in tokens, or infinity
    if a layer has none.
    """

    parameters: float
    weight_bytes: float
    kv_bytes: float
    window: float = math.inf

    @property
    def num_bytes(self) -> float:
        return self.parameters * self.weight_bytes

    def kv_bytes_of(self, num_tokens: float) -> float:
        """Return the bytes of KV of a sequence."""
        return min(num_tokens, self.window) * self.kv_bytes

    def memory_bytes(self, num_tokens: float) -> float:
        """Return the memory of the weights and the KV of one sequence, in bytes."""
        return self.num_bytes + self.kv_bytes_of(num_tokens)


@dataclass(frozen=True)
class Accelerator:
    """Dense FLOP/s at the precision of the weights, memory in bytes, and bandwidth in bytes per second.

    `compute_share` and `bandwidth_share` are the fractions of the two rates in practice.
    """

    flops: float
    memory_bytes: float
    bandwidth: float
    compute_share: float
    bandwidth_share: float


@dataclass(frozen=True)
class RequestLoad:
    """Requests per second, mean tokens, the share of cached prompt tokens, and the goals in seconds."""

    rate: float
    prompt: float
    output: float
    cached: float
    ttft_s: float
    tpot_s: float

    @property
    def uncached(self) -> float:
        return self.prompt * (1 - self.cached)


@dataclass(frozen=True)
class Estimate:
    """Estimate. `link_bits` per second hide the KV transfer of a prefill worker; `traffic_bits` is the mean."""

    prefill_workers: int
    decode_workers: int
    prompt_s: float
    wait_s: float
    batch: int
    step_s: float
    link_bits: float
    traffic_bits: float


def size(model: ModelSize, accelerator: Accelerator, load: RequestLoad) -> Estimate:
    """Return the smallest pools that meet both goals on average. Raises Infeasible."""
    tokens_per_s = accelerator.flops * accelerator.compute_share / (2 * model.parameters)
    sent = min(load.uncached, model.window)
    prompt_s = load.uncached / tokens_per_s
    num_prefill, wait_s = _prefill(load, prompt_s)
    batch, step_s = _batch(model, accelerator, load)
    return Estimate(
        prefill_workers=num_prefill,
        decode_workers=max(1, math.ceil(load.rate * load.output * step_s / batch / MAX_UTILISATION)),
        prompt_s=prompt_s,
        wait_s=wait_s,
        batch=batch,
        step_s=step_s,
        link_bits=8 * model.kv_bytes * tokens_per_s * (sent / load.uncached if sent else 1.0),
        traffic_bits=8 * model.kv_bytes * sent * load.rate,
    )


def _prefill(load: RequestLoad, prompt_s: float) -> tuple[int, float]:
    """Return the number of workers and the mean wait, which is within QUEUE_SHARE of the time left by the goal."""
    room_s = (load.ttft_s - prompt_s) * QUEUE_SHARE
    if room_s <= 0:
        raise Infeasible(
            f"TTFT of {load.ttft_s * 1e3:.0f} ms: computing a prompt takes {prompt_s * 1e3:.0f} ms on one worker"
        )
    # u t / (2 (1 - u)) <= room  <=>  u <= 2 room / (t + 2 room)
    utilisation = min(MAX_UTILISATION, 2 * room_s / (prompt_s + 2 * room_s))
    num = max(1, math.ceil(load.rate * prompt_s / utilisation - 1e-9))
    used = load.rate * prompt_s / num
    return num, used * prompt_s / (2 * (1 - used))


def _batch(model: ModelSize, accelerator: Accelerator, load: RequestLoad) -> tuple[int, float]:
    """Return the largest batch that the goal and the memory allow, and the seconds of its step."""
    bandwidth = accelerator.bandwidth * accelerator.bandwidth_share
    flops = accelerator.flops * accelerator.compute_share
    weights_s = model.num_bytes / bandwidth
    goal_s = load.tpot_s * TPOT_SHARE
    room = accelerator.memory_bytes * MEMORY_SHARE - model.num_bytes
    longest = model.kv_bytes_of(load.prompt + load.output)
    if room < longest:
        raise Infeasible(
            f"memory of {accelerator.memory_bytes / 1e9:.0f} GB: weights take {model.num_bytes / 1e9:.1f} GB, "
            f"one sequence {longest / 1e9:.2f} GB"
        )
    if weights_s > goal_s:
        raise Infeasible(f"TPOT of {load.tpot_s * 1e3:.0f} ms: reading the weights takes {weights_s * 1e3:.1f} ms")
    each_s = model.kv_bytes_of(load.prompt + load.output / 2) / bandwidth
    compute_s = 2 * model.parameters / flops
    batch = max(1, int(min(room / longest, (goal_s - weights_s) / each_s, goal_s / compute_s)))
    return batch, max(weights_s + batch * each_s, batch * compute_s)


def report(sizing: Estimate) -> str:
    """Return the output of `diptych size`."""
    rows = (
        ("prefill workers", f"{sizing.prefill_workers}"),
        ("decode workers", f"{sizing.decode_workers}"),
        ("a prompt takes", f"{sizing.prompt_s * 1e3:.0f} ms, after a mean wait of {sizing.wait_s * 1e3:.0f} ms"),
        ("a decode step takes", f"{sizing.step_s * 1e3:.1f} ms at {sizing.batch} sequences"),
        ("link of a prefill worker", f"{sizing.link_bits / 1e9:.1f} Gb/s to overlap the KV transfer with computation"),
        ("KV traffic", f"{sizing.traffic_bits / 1e9:.2f} Gb/s on average, over all workers"),
    )
    return "\n".join(f"  {name:<26}{text}" for name, text in rows)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych size`."""
    parser = CommandParser(
        "diptych size",
        description="Estimate the number of prefill and decode workers for a load.",
        epilog="Example: diptych size --parameters 8e9 --kv-bytes 131072 --tflops 989 --memory-gb 141 "
        "--bandwidth-gbs 4800 --rate 20 --prompt 3000 --output 300 --ttft-ms 500 --tpot-ms 20",
    )
    positive, part, share = number(above=0), number(above=0, high=1), number(0, 1)
    model = parser.add_argument_group("model (--parameters and one of --kv-bytes and --config are required)")
    model.add_argument("--parameters", type=positive, required=True, metavar="N", help="parameters, such as 8e9")
    model.add_argument("--weight-bytes", type=positive, default=2, metavar="X", help="bytes per parameter (default 2)")
    cached = model.add_mutually_exclusive_group(required=True)
    cached.add_argument(
        "--kv-bytes",
        type=positive,
        metavar="N",
        help="bytes of KV per token: 2 x layers x KV heads x head size x bytes per number",
    )
    cached.add_argument(
        "--config", type=kv_bytes_of, metavar="FILE", help="config.json of the model, from which --kv-bytes follows"
    )
    model.add_argument(
        "--window",
        type=positive,
        default=math.inf,
        metavar="N",
        help="attention window in tokens, if all layers have one (default: none)",
    )
    device = parser.add_argument_group("accelerator, from its data sheet (required)")
    device.add_argument(
        "--tflops", type=positive, required=True, metavar="X", help="dense TFLOP/s at the precision of the weights"
    )
    device.add_argument("--memory-gb", type=positive, required=True, metavar="X", help="memory in GB")
    device.add_argument("--bandwidth-gbs", type=positive, required=True, metavar="X", help="memory bandwidth in GB/s")
    device.add_argument(
        "--compute-share", type=part, default=0.6, metavar="X", help="usable fraction of the TFLOP/s (default 0.6)"
    )
    device.add_argument(
        "--bandwidth-share",
        type=part,
        default=0.7,
        metavar="X",
        help="usable fraction of the bandwidth (default 0.7)",
    )
    load = parser.add_argument_group("load and goals (required)")
    load.add_argument("--rate", type=positive, required=True, metavar="X", help="requests per second")
    load.add_argument("--prompt", type=positive, required=True, metavar="N", help="mean prompt length in tokens")
    load.add_argument("--output", type=positive, required=True, metavar="N", help="mean output length in tokens")
    load.add_argument(
        "--cached", type=share, default=0.0, metavar="X", help="fraction of prompt tokens that are cached (default 0)"
    )
    load.add_argument("--ttft-ms", type=positive, required=True, metavar="X", help="goal for the TTFT, in milliseconds")
    load.add_argument("--tpot-ms", type=positive, required=True, metavar="X", help="goal for the TPOT, in milliseconds")
    return parser


def parse(argv: Sequence[str]) -> tuple[ModelSize, Accelerator, RequestLoad]:
    """Return the model, the accelerator and the load of a command line."""
    given = build_parser().parse_args(argv)
    return (
        ModelSize(given.parameters, given.weight_bytes, given.kv_bytes or given.config, given.window),
        Accelerator(
            given.tflops * 1e12,
            given.memory_gb * 1e9,
            given.bandwidth_gbs * 1e9,
            given.compute_share,
            given.bandwidth_share,
        ),
        RequestLoad(given.rate, given.prompt, given.output, given.cached, given.ttft_ms / 1e3, given.tpot_ms / 1e3),
    )


def kv_bytes_of(path: str) -> float:
    """Return the bytes of KV per token in bfloat16 for a config.json."""
    try:
        return 2.0 * from_hf(Path(path)).kv_numbers
    except ModelError as error:
        raise argparse.ArgumentTypeError(f"{error}; use --kv-bytes for other models") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 if no number of workers meets the goals."""
    try:
        print(report(size(*parse(sys.argv[1:] if argv is None else argv))))
    except Infeasible as error:
        print(f"diptych size: cannot meet the goals: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
