"""TTFT of conversations that do not fit in memory, with a tier on disk, with pulls from a peer, and with neither; of
prompts that nothing holds; and of the first requests after a worker was killed.

Conversations of a Mooncake trace are replayed one request at a time, each block of the trace as one KV block, on a
prefill worker whose memory holds a tenth of all their blocks. The stacks run one after the other, in turning order,
with an empty file each time. Then all get prompts that were never sent. Last the worker with the file is killed and
started again, and the last turn of each conversation is sent once more. The peer is the decode worker, whose memory
holds all that came to it; in the other stacks nothing is pulled.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

from benchmarks.arms import Target, stack_parser
from benchmarks.conversations import conversations, last_turns, num_distinct, shared_blocks
from benchmarks.load.report import open_console, print_table
from benchmarks.load.summary import RequestRecord, percentile
from benchmarks.load.trace import TraceRow, read_trace
from benchmarks.load.workload import LengthRange, RequestPlan, Workload
from benchmarks.script import in_turns, median_ratio, run, write_result
from benchmarks.stack import Stack, StackProcess, StackSettings

PROGRAM = "python -m benchmarks.tiers"
WITH, WITHOUT, PULLS = "with the file", "memory alone", "with pulls"
ARMS = (WITHOUT, WITH, PULLS)
OUTPUT_LEN = 2
TIERS = ("memory", "disk", "peer")
READY_S = 300.0
SETTLE_S = 60.0


@dataclass
class Replay:
    """One stack's samples of one round: TTFT in ms by part, and tokens found in each tier while conversations ran."""

    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    num_hit_tokens: dict[str, float] = field(default_factory=dict)
    num_tokens: float = 0.0
    restart: dict[str, Any] = field(default_factory=dict)

    def add(self, part: str, records: Sequence[RequestRecord]) -> None:
        self.ttft_ms[part] = [round(record.ttft_s * 1000, 3) for record in records]

    @property
    def hit_rates(self) -> dict[str, float]:
        return {tier: round(self.num_hit_tokens.get(tier, 0.0) / max(1.0, self.num_tokens), 4) for tier in TIERS}


class Bench:
    """`rows` are the conversations; `options` the script's."""

    def __init__(self, options: Namespace, rows: Sequence[TraceRow]) -> None:
        self._options, self._rows = options, rows
        longest = max(len(row.block_ids) for row in rows) + 1
        self.num_blocks = max(longest, round(num_distinct(rows) / options.times))

    def stack(self, arm: str, folder: Path) -> Stack:
        options = self._options
        file = ("--kv-disk-path", str(folder / "blocks"), "--kv-disk-gib", str(options.disk_gib))
        threads = ("--threads", str(options.threads))
        return Stack(
            StackSettings(
                model=options.model,
                dtype=options.dtype,
                worker_flags=(
                    *("--block-size", str(options.block_size), "--kv-transport", options.kv_transport, *threads),
                    *(() if arm == PULLS else ("--no-pull-prefixes",)),
                ),
                prefill_flags=("--num-blocks", str(self.num_blocks), *(file if arm == WITH else ())),
                decode_flags=("--max-draft-tokens", "0"),
                router_flags=("--local-prefill-threshold", "0"),
                log_dir=options.log_dir,
                ready_timeout_s=READY_S,
            )
        )

    def measure(self, arm: str, number: int, step: Any) -> Replay:
        """All parts on a new stack. `step` is called after each request."""
        with tempfile.TemporaryDirectory(prefix="diptych-tiers-") as folder, self.stack(arm, Path(folder)) as stack:
            return asyncio.run(self._measure(arm, stack, number, step))

    async def _measure(self, arm: str, stack: Stack, number: int, step: Any) -> Replay:
        options, found = self._options, Replay()
        (worker,) = stack.workers("prefill")
        target = Target.of(stack.url, vocab_size=options.vocab_size)
        turns = Workload(
            target.vocabulary, *_unused(), seed=options.seed + number, rows=self._rows, block_tokens=options.block_size
        )
        new = target.workload(options.new_len, OUTPUT_LEN, options.seed + 1000 + number)
        try:
            warm = [new.request(index) for index in range(10**6, 10**6 + options.warm_up)]
            await _ask_all(target, warm, lambda: None)
            before = tier_tokens(worker)
            plans = [turns.request(index) for index in range(len(self._rows))]
            found.add("conversations", await _ask_all(target, plans, step))
            after = tier_tokens(worker)
            found.num_tokens = float(sum(plan.input_len for plan in plans))
            found.num_hit_tokens = {tier: after.get(tier, 0.0) - before.get(tier, 0.0) for tier in TIERS}
            found.add("new prompts", await _ask_all(target, [new.request(i) for i in range(options.new)], step))
            if arm == WITH:
                found.restart = await self._restart(target, stack, plans, found)
        finally:
            await target.client.close()
        return found

    async def _restart(
        self, target: Target, stack: Stack, plans: Sequence[RequestPlan], found: Replay
    ) -> dict[str, Any]:
        """Kill the prefill worker, start it again, and send the last turns once more."""
        (worker,) = stack.workers("prefill")
        worker.kill()
        await asyncio.to_thread(stack.restart, worker)
        await asyncio.to_thread(_wait_for, stack, worker)
        last = [plans[place] for place in last_turns(self._rows)]
        records = await _ask_all(target, last[:1], lambda: None)
        first = tier_tokens(worker)
        records += await _ask_all(target, last[1:], lambda: None)
        found.add("after a restart", records)
        tokens, num_tokens = tier_tokens(worker), sum(plan.input_len for plan in last)
        return {
            "requests": len(last),
            "first_prompt_tokens": last[0].input_len,
            "first_from_disk": first.get("disk", 0.0),
            "hit_rates": {tier: round(tokens.get(tier, 0.0) / num_tokens, 4) for tier in TIERS},
        }


async def _ask_all(target: Target, plans: Sequence[RequestPlan], step: Any) -> list[RequestRecord]:
    """One after the other. Raises RuntimeError when one fails."""
    records = []
    for plan in plans:
        record = RequestRecord(plan.index)
        await target.client.complete(RequestPlan(plan.index, plan.prompt, plan.input_len, OUTPUT_LEN), record)
        if not record.ok:
            raise RuntimeError(f"request {plan.index} ended as {record.outcome!r}: {record.message}")
        records.append(record)
        step()
    return records


def tier_tokens(worker: StackProcess) -> dict[str, float]:
    """Prompt tokens that the worker found in each tier since its start."""
    text = httpx.get(f"{worker.http_url}/metrics", timeout=10.0, trust_env=False).text
    return {
        sample.labels["tier"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "diptych_prefix_hit_tokens_total"
    }


def _wait_for(stack: Stack, worker: StackProcess) -> None:
    """Until the router uses the worker again. Raises RuntimeError."""
    deadline, name = time.monotonic() + SETTLE_S, f'worker="{worker.name}"'
    while time.monotonic() < deadline:
        page = httpx.get(f"{stack.url}/metrics", timeout=10.0, trust_env=False).text
        lines = (line for line in page.splitlines() if line.startswith("diptych_worker_state") and name in line)
        if any('state="ready"' in line and line.endswith(" 1.0") for line in lines):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{worker.name} was not ready {SETTLE_S:g} s after its restart")


def _unused() -> tuple[LengthRange, LengthRange]:
    """The trace has the lengths."""
    return LengthRange(1, 1), LengthRange(1, 1)


def summary(replays: dict[str, list[Replay]]) -> list[dict[str, Any]]:
    """A row a part: percentiles over the samples of all rounds, and the median of the rounds' ratios of medians."""
    rows = []
    for part in ("conversations", "new prompts", "after a restart"):
        row: dict[str, Any] = {"part": part}
        for arm, found in replays.items():
            if samples := sorted(value for replay in found for value in replay.ttft_ms.get(part, ())):
                row[arm] = {f"p{q}_ms": round(percentile(samples, q), 2) for q in (50, 99)}
        medians = {
            arm: [statistics.median(replay.ttft_ms[part]) for replay in found if part in replay.ttft_ms]
            for arm, found in replays.items()
        }
        for name, arm in (("ratio_p50", WITH), ("ratio_p50_pulls", PULLS)):
            if medians.get(arm) and medians.get(WITHOUT):
                row[name] = median_ratio(medians[arm], medians[WITHOUT])
        rows.append(row)
    return rows


def print_rows(console: Console, rows: Sequence[dict[str, Any]], replays: dict[str, list[Replay]]) -> None:
    shown = []
    for row in rows:
        cells = [f"{row[arm][q]:,.1f}" if arm in row else "-" for arm in ARMS for q in ("p50_ms", "p99_ms")]
        shown.append((row["part"], *cells, *(str(row.get(name, "-")) for name in ("ratio_p50", "ratio_p50_pulls"))))
    columns = ("", *(f"{q} {arm}" for arm in ARMS for q in ("p50", "p99")), "p50 ratio, file", "p50 ratio, pulls")
    print_table(console, "TTFT in ms", columns, shown)
    for arm, found in replays.items():
        console.print(f"hit rates, {arm}: {[replay.hit_rates for replay in found]}")
    console.print(f"after a restart: {[replay.restart for replay in replays[WITH]]}")


def parse(argv: Sequence[str]) -> Namespace:
    parser = stack_parser(PROGRAM, __doc__)
    parser.add_argument("trace", type=Path, help="a Mooncake trace")
    parser.add_argument("--conversations", type=int, default=16, help="to replay: the trace's first")
    parser.add_argument("--turns", type=int, default=5, help="that a conversation has at least")
    parser.add_argument("--longest", type=int, default=64, help="prompt, in blocks")
    parser.add_argument(
        "--times",
        type=float,
        default=10.0,
        help="all blocks over those in memory, which holds the longest prompt at least",
    )
    parser.add_argument("--disk-gib", type=float, default=4.0, help="size of the file")
    parser.add_argument("--new", type=int, default=24, help="prompts that nothing holds")
    parser.add_argument("--new-len", type=int, default=480, help="tokens of these")
    parser.add_argument("--warm-up", type=int, default=4, help="such prompts that are not measured, first")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--kv-transport", default="auto", help="between the workers: auto, tcp or shm")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    rows = conversations(
        read_trace(options.trace),
        number=options.conversations,
        least_turns=options.turns,
        most_blocks=options.longest,
        block_tokens=options.block_size,
    )
    bench = Bench(options, rows)
    replays: dict[str, list[Replay]] = {arm: [] for arm in ARMS}
    with Progress() as progress:
        bar = progress.add_task("requests", total=options.repeats * len(ARMS) * (len(rows) + options.new))
        for number in range(options.repeats):
            for arm in in_turns(ARMS, number):
                replays[arm].append(bench.measure(arm, number, lambda: progress.advance(bar)))
    found = summary(replays)
    shape = {
        "requests": len(rows),
        "distinct_blocks": num_distinct(rows),
        "blocks_in_memory": bench.num_blocks,
        "times_memory": round(num_distinct(rows) / bench.num_blocks, 2),
        "share_seen_before": round(sum(shared_blocks(rows)) / sum(len(row.block_ids) for row in rows), 4),
    }
    console = open_console()
    console.print(f"{shape}")
    print_rows(console, found, replays)
    rounds = {
        arm: [{"ttft_ms": r.ttft_ms, "hit_rates": r.hit_rates, "restart": r.restart} for r in each]
        for arm, each in replays.items()
    }
    more = {name: getattr(options, name) for name in ("model", "dtype", "threads", "repeats")}
    write_result(options, PROGRAM, argv, {"load": shape, "rows": found, "rounds": rounds}, **more)
    return 0


if __name__ == "__main__":
    run(main)
