"""PASS or FAIL, with the number and the threshold that decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gpu.chip import Chip  # imports torch, which the controlling process does not need

ITSELF, REFERENCE = "the part itself", "the reference's numbers"
LEAST_COPY, LEAST_MATMUL = 0.8, 0.6
"""Of a data sheet's bandwidth and dense bf16 rate."""
GOALS = {("decode attention", "32 x 4,096"): 0.9, ("prefill attention", "8,192"): 0.65}
"""Of the measured copy rate, and of the measured matmul rate, at the sizes where these bind."""
LEAST_OF_FLOOR = {"decode attention": 0.7, "prefill attention": 0.5}
LEAST_OF_FLOOR_ELSE = 0.4
"""At other sizes, of the time that the chip's own rates allow; small kernels are bound by their launch."""
MOST_OF_PEER = {"batch-invariant product": 1.6}
MOST_OF_PEER_ELSE = 1.1
OTHER_WORK = ("scaled_mm, fp8 inputs",)
"""Peers that are timed but not compared, because they also round their inputs to 8 bits."""
"""Times the fastest peer's time. A product that may not choose its algorithm by the batch has a price."""
MOST_TIMES_FLOOR = 1.15
"""Of a recorded decode step, beside the reading of all weights and KV."""
LEAST_OF_MATMUL = 0.5
"""Of a prefill of the longest prompt."""
LEAST_PINNED, LEAST_OF_RAW = 10.0, 0.5
"""GB/s of copies to and from pinned memory; share of raw TCP that a transfer from device to device reaches."""
LEAST_RING = 10.0
"""GB/s from device to device through a ring, whose copies are pinned: what one thread takes checksums at, at least."""
LEAST_IPC = 20.0
"""GB/s from one GPU's memory to another's, which no thread and no byte of the host has a part in."""
MOST_TPOT = 2.0
"""Times the engine's own step at as many requests."""
SHEETS = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100": (1.555e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
}
"""Bytes and dense bf16 FLOPs a second, from data sheets, by a part of the name that torch gives: the first one."""


class Verdict(NamedTuple):
    """`what` was found to be `found`, where `wanted` is asked for. skipped: it was not judged, and why."""

    part: str
    what: str
    ok: bool
    found: str
    wanted: str
    skipped: str = ""

    def __str__(self) -> str:
        word = "SKIP" if self.skipped else "PASS" if self.ok else "FAIL"
        return f"{word}  {self.part}: {self.what}: {self.found} ({self.skipped or self.wanted})"

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the line."""
        return self._asdict() | {"line": str(self)}


def of_chip(chip: Chip) -> Iterator[Verdict]:
    sheet = next((rates for name, rates in SHEETS.items() if name in chip.name), (0.0, 0.0))
    copy, matmul = chip.copy_rate, chip.matmul_rate
    unknown = "" if sheet[0] else "no data sheet of this chip here"
    least = LEAST_COPY * sheet[0]
    wanted = f"at least {least / 1e9:,.0f}"
    yield Verdict("chip", "copy", copy >= least, f"{copy / 1e9:,.1f} GB/s", wanted, unknown)
    least = LEAST_MATMUL * sheet[1]
    wanted = f"at least {least / 1e12:,.0f}"
    yield Verdict("chip", "matmul", matmul >= least, f"{matmul / 1e12:,.1f} TFLOP/s", wanted, unknown)


def at_least(part: str, what: str, share: float, least: float, of: str) -> Verdict:
    return Verdict(part, what, share >= least, f"{share:.0%} of {of}", f"at least {least:.0%}")


def at_most(part: str, what: str, times: float, most: float, of: str) -> Verdict:
    return Verdict(part, what, times <= most, f"{times:.2f} times {of}", f"at most {most:g}")


def of_check(part: str, name: str, problem: str) -> Verdict:
    return Verdict(part, name, not problem, problem or "agrees", REFERENCE)


def of_kernel(part: str, row: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare with the floor, and with the fastest peer that does the same work."""
    what = f"{row['kernel']}, {row['size']}"
    least = GOALS.get((row["kernel"], row["size"]), LEAST_OF_FLOOR.get(row["kernel"], LEAST_OF_FLOOR_ELSE))
    yield at_least(part, what, row["of_floor"], least, "the floor")
    peers = {name: us for name, us in row["peers_us"].items() if name not in OTHER_WORK}
    times = {name: us for name, us in peers.items() if isinstance(us, float) and us > 0}
    if times:
        fastest = min(times, key=lambda name: times[name])
        ratio = row["us"] / times[fastest]
        most = MOST_OF_PEER.get(row["kernel"], MOST_OF_PEER_ELSE)
        yield at_most(part, f"{what} vs. {fastest}", ratio, most, "its time")


def of_step(kind: str, row: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge a "prefill" or "decode" row of the engine. Steps kernel by kernel are only reported."""
    if kind == "prefill":
        what = f"prefill of {row['tokens']:,}"
        yield at_least("engine", what, row["of_matmul_rate"], LEAST_OF_MATMUL, "the matmul rate")
        return
    what = f"{row['how']}, {row['batch']} rows of {row['context']:,}"
    if row["skipped"]:
        yield Verdict("engine", what, False, "not measured", "", row["skipped"])
        return
    found = f"{row['ms']:.3f} ms, {row['tokens_per_s']:,.0f} tokens/s, {row['times_floor']:.2f} times the floor"
    is_recorded = row["how"] == "recorded"
    is_told = "" if is_recorded else "for comparison"
    yield Verdict(
        "engine", what, row["times_floor"] <= MOST_TIMES_FLOOR, found, f"at most {MOST_TIMES_FLOOR:g}", is_told
    )


def of_transfer(rows: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    for row in rows:
        rate = row["gb_per_s"]
        if "one_block" in row:
            wanted = f"at least {LEAST_PINNED:g}"
            yield Verdict("transfer", row["path"], rate >= LEAST_PINNED, f"{rate:,.1f} GB/s", wanted)
        elif "of_raw" in row:
            yield at_least("transfer", row["path"], row["of_raw"], LEAST_OF_RAW, "raw TCP")
        elif "direct" in row:
            how = "copied by the device" if row["direct"] else "through buffers: read-only memory is not registered"
            wanted = f"at least {LEAST_RING:g}, by the device"
            ok = row["direct"] and rate >= LEAST_RING
            yield Verdict("transfer", row["path"], ok, f"{rate:,.1f} GB/s, {how}", wanted)


def of_ipc(row: Mapping[str, Any]) -> Verdict:
    if "survived" in row:
        found = f"{row['rounds']} rounds, {row['wrong']} other blocks {row['problem']}".rstrip()
        return Verdict("ipc", row["path"], row["survived"], found, "they go on, with the same bytes")
    rate = row["gb_per_s"]
    return Verdict("ipc", row["path"], rate >= LEAST_IPC, f"{rate:,.1f} GB/s", f"at least {LEAST_IPC:g}")


def of_hiding(rows: Sequence[Mapping[str, Any]], prefill_rate: float) -> Iterator[Verdict]:
    """Whether the best path ships KV as fast as prefill makes it, `prefill_rate` bytes a second; 0: not measured."""
    rates = {row["path"]: row["gb_per_s"] for row in rows if "of_raw" in row or "direct" in row}
    if rates and prefill_rate > 0:
        best = max(rates, key=lambda path: rates[path])
        made = f"{prefill_rate / 1e9:,.2f} GB/s of KV that prefill makes"
        yield at_least("transfer", f"hidden behind prefill, {best}", 1e9 * rates[best] / prefill_rate, 1.0, made)


def of_serving(row: Mapping[str, Any], step_ms: float) -> Verdict:
    """`step_ms`: of the engine at as many requests; 0: not measured. A request that fails ends the part."""
    most = MOST_TPOT * step_ms
    times = f"TTFT {row['ttft_p50_ms']:,.0f} ms, TPOT {row['tpot_p50_ms']:.2f} ms"
    found = f"{row['output_tokens_per_s']:,.0f} tokens/s, {times}"
    wanted = f"all {row['requests']} answered" + (f", TPOT at most {most:.2f} ms" if most else "")
    return Verdict("serving", row["arm"], not most or row["tpot_p50_ms"] <= most, found, wanted)
