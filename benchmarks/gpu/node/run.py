"""The process that runs the parts of `make gpu`: `python -m benchmarks.gpu.node.run`, started by `__main__`.

Each part imports its own packages, so that a missing package fails only that part, and is stopped at its deadline.
Results are written after each finding. A later process continues from them.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import report
from benchmarks.gpu.node import verdict
from benchmarks.gpu.node.options import FAILED, LOST, NO_GPU, PASSED, PROGRAM, parse, seconds_of
from benchmarks.gpu.node.verdict import ITSELF, Verdict
from benchmarks.time_limit import TimeOver, time_limit

if TYPE_CHECKING:
    from benchmarks.gpu.case import MakeCase
    from benchmarks.gpu.chip import Chip

QUICK_REPEATS, REPEATS = 10, 40
QUICK_DECODE_STEPS = 16
CHECKED_LAYERS = 2
DRY_KV_MEMORY_GIB = 0.01
DRY_BUCKETS, BUCKETS = 2, 256
"""Largest batch for which decode workers on a GPU record steps by default. All buckets up to it are compared."""
DRY_TOKENS = 640
GRACE_S = 10.0
SPEEDS = ("chip", "kernels", "quantised", "moe", "mla", "engine", "serving", "transfer")
"""Parts whose thresholds are for chips: a dry run shows that they work, and judges nothing."""


class MissingPrerequisite(RuntimeError):
    """A part is not measured, because it needs another part that failed or did not run."""


class DeviceLost(RuntimeError):
    """The device no longer responds to this process, for example after an illegal memory access."""


class PartsRun:
    """The parts that one process runs. In a dry run, Triton must be imported with its interpreter enabled."""

    def __init__(self, options: Namespace, own: Namespace, argv: Sequence[str]) -> None:
        """Import torch and Triton. Raises ImportError."""
        import torch

        from benchmarks.gpu.chip import numbered, versions
        from benchmarks.gpu.shape import DRY, LLAMA_8B
        from benchmarks.gpu.timer import Timer
        from benchmarks.load.conditions import conditions
        from kernels.backends import FOUND
        from kernels.gpu import backend

        self.options, self.backend, self._own = options, backend, own
        self._until = time.monotonic() + own.left_s if own.left_s else float("inf")
        self.device = torch.device("cpu") if options.dry_run else numbered(torch.device(options.device))
        if options.dry_run:
            FOUND["cpu"] = backend
        else:
            torch.cuda.set_device(self.device)
        torch.manual_seed(datetime.now(UTC).microsecond)
        self.shape = DRY if options.dry_run else LLAMA_8B
        if options.quick:
            few = self.shape.prefill_lengths[:2]
            self.shape = replace(self.shape, prefill_lengths=few, decode_steps=QUICK_DECODE_STEPS)
        self._few_layers = replace(self.shape, num_layers=CHECKED_LAYERS)
        self.timer = Timer(self.device, 1 if options.dry_run else QUICK_REPEATS if options.quick else REPEATS)
        self._path, self._lines = options.out / "gpu.json", options.out / "verdicts.txt"
        self.found: dict[str, Any] = {"dry_run": options.dry_run}
        if self._path.exists():
            self.found = json.loads(self._path.read_text())
        if "conditions" not in self.found:
            self.found["conditions"] = conditions(PROGRAM, argv) | versions(self.device)
        for name in ("problems", "errors", "seconds"):
            self.found.setdefault(name, {})
        self.found.setdefault("verdicts", [])

    # ---------------------------------------------------------------- common to all parts

    def run(self) -> bool:
        """Run the parts in order, until the time limit. Returns whether every verdict is PASS."""
        parts = self.parts()
        done: list[str] = []
        for name in self.options.parts:
            left = self._until - time.monotonic()
            if left <= 0:
                break
            deadline = min(seconds_of(name, self.options) or left, left)
            self._progress(name, done)
            self._run(name, parts[name], 0.0 if deadline == float("inf") else deadline)
            done.append(name)
            self._progress("", done)
        return all(one["ok"] or one["skipped"] for one in self.found["verdicts"])

    def parts(self) -> dict[str, Callable[[], None]]:
        return {
            "chip": self.measure_chip,
            "agreement": self.check_agreement,
            "engine": self.measure_engine,
            "kernels": self.measure_kernels,
            "quantised": self.measure_quantised,
            "moe": self.measure_experts,
            "mla": self.measure_latents,
            "graphs": self.check_graphs,
            "transfer": self.measure_transfer,
            "ipc": self.check_ipc,
            "serving": self.measure_serving,
            "landing": self.check_landing,
            "invariance": self.check_invariance,
            "families": self.check_families,
            "boxes": self.check_boxes,
            "launches": self.count_launches,
            "ranks": self.check_ranks,
            "tiles": self.measure_tiles,
        }

    def _run(self, name: str, part: Callable[[], None], seconds: float) -> None:
        """Run one part, and record its duration and its failure."""
        began, problem = time.monotonic(), ""
        try:
            with time_limit(seconds, GRACE_S):
                part()
        except TimeOver:
            problem = f"stopped at its deadline of {seconds:.0f} s"
        except DeviceLost as error:
            self._failed(name, str(error))
            raise
        except Exception as error:
            problem = self._words(name, error)
        took = round(time.monotonic() - began, 1)
        self.found["seconds"][name] = took
        if problem:
            self._failed(name, problem)
        self.save()
        print(f"{name}: {took:,.1f} s", flush=True)
        self._release()

    def _failed(self, name: str, problem: str) -> None:
        self.found["errors"][name] = problem
        self.record(Verdict(name, ITSELF, False, problem, "no error"))

    def _words(self, name: str, error: Exception) -> str:
        """Describe a failure in a line, and print its traceback. Raises DeviceLost if the device no longer responds."""
        import torch

        from benchmarks.gpu.case import words_of

        words = words_of(error)
        if isinstance(error, MissingPrerequisite):
            return str(error)
        if isinstance(error, ImportError):
            return str(error)
        print(f"FAILED  {name}: {words}", flush=True)
        print_exception(error, limit=-8, file=sys.stdout)
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:
                raise DeviceLost(f"{words}; the device was lost") from lost
        return words

    def record(self, one: Verdict) -> None:
        """Print a verdict, and write it to verdicts.txt and gpu.json."""
        if self.options.dry_run and one.part in SPEEDS and one.what != ITSELF and one.wanted != verdict.REFERENCE:
            one = one._replace(skipped=one.skipped or "a dry run")
        self.found["verdicts"].append(one.as_json())
        print(one, flush=True)
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(f"{one}\n")
        self.save()

    def save(self) -> None:
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")

    def _progress(self, running: str, done: Sequence[str]) -> None:
        """Report progress to the controlling process. Written atomically, because it may be read at any time."""
        file: Path = self._own.progress
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"running": running, "since": time.monotonic(), "done": done}))
        new.replace(file)

    def _release(self) -> None:
        """Free unused memory for the next part and its processes."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def keep(self, name: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Save each row at once, because a later one may fail or take too long."""
        kept: list[dict[str, Any]] = []
        self.found[name] = kept
        for row in rows:
            kept.append(row)
            self.save()
            yield row

    def judge_rows(self, name: str, rows: Iterable[dict[str, Any]], judge: Callable[[dict[str, Any]], Verdict]) -> None:
        for row in self.keep(name, rows):
            self.record(judge(row))

    @property
    def chip(self) -> Chip:
        """The measured rates. Raises MissingPrerequisite without them."""
        from benchmarks.gpu.chip import Chip

        if "chip" not in self.found:
            raise MissingPrerequisite("not measured, because the part chip failed: all floors derive from its rates")
        return Chip(**self.found["chip"])

    def _require_agreement(self) -> None:
        """Raise MissingPrerequisite unless the kernels agree with plain torch. Runs the check if no part has."""
        if "agreement" not in self.found:
            self.check_agreement()
        if wrong := [problem for row in self.found["agreement"] for problem in row["problems"]]:
            raise MissingPrerequisite(f"not measured, because kernels do not agree with plain torch: {wrong[0]}")

    def measure_cases(self, name: str, title: str, cases: Iterable[MakeCase]) -> None:
        """Check each kernel, and time it if it is correct. A failure does not stop the others."""
        from benchmarks.gpu.case import name_of

        rows: list[dict[str, Any]] = []
        self.found[name] = rows
        try:
            for make in cases:
                label = getattr(make, "func", make).__name__
                try:
                    case = make()
                    label = name_of(case)
                    if any(word in label for word in self.options.skip):
                        continue
                    problem = case.problem()
                    self._note(name, label, problem)
                    if problem:
                        continue
                    rows.append(case.measure(self.chip, self.timer))
                except MissingPrerequisite:
                    raise
                except Exception as error:
                    self._note(name, label, self._words(label, error))
                    continue
                for one in verdict.of_kernel(name, rows[-1]):
                    self.record(one)
                del case
        finally:
            if rows:
                report.print_kernels(title, rows)

    def _note(self, part: str, name: str, problem: str) -> None:
        self.found["problems"][name] = problem
        self.record(verdict.of_check(part, name, problem))

    # ---------------------------------------------------------------- the parts

    def measure_chip(self) -> None:
        from benchmarks.gpu.chip import measure_chip

        chip = measure_chip(self.shape, self.timer)
        self.found["chip"] = asdict(chip)
        report.print_chip(self.found["chip"], self.found["conditions"])
        for one in verdict.of_chip(chip):
            self.record(one)

    def check_agreement(self) -> None:
        """The check of a worker's start, at the shape of the benchmark's model."""
        from benchmarks.gpu.node.families import DRY, family_of, family_row, of_family

        if self.options.dry_run:
            rows = [family_row(DRY, self.shape.dtype, self.device, DRY_TOKENS)]
        else:
            rows = [family_row(family_of(self.shape), self.shape.dtype, self.device)]
        self.judge_rows("agreement", rows, of_family)

    def measure_engine(self) -> None:
        from benchmarks.gpu.engine import measure_engine

        chip = self.chip
        self._require_agreement()
        found: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        self.found["engine"] = found
        try:
            for kind, row in measure_engine(self.shape, chip, self.timer):
                found[kind].append(row)
                for one in verdict.of_step(kind, row):
                    self.record(one)
        finally:
            report.print_rows("Prefill, one prompt", found["prefill"])
            report.print_rows("Decode steps", [row for row in found["decode"] if not row["skipped"]])

    def measure_kernels(self) -> None:
        from benchmarks.gpu.attention import awkward_problem, decode_case, prefill_case, small_chunk_case
        from benchmarks.gpu.elementwise import elementwise_cases
        from benchmarks.gpu.gate import poisoned
        from benchmarks.gpu.held import invariant_cases

        shape, device, backend = self.shape, self.device, self.backend
        with poisoned():
            problem = awkward_problem(backend, shape, device, short=self.options.dry_run)
        self._note("kernels", "attention of awkward lengths", problem)

        def cases() -> Iterator[MakeCase]:
            for batch in shape.decode_batches:
                yield partial(decode_case, backend, shape, batch, device)
            for length in shape.prefill_lengths:
                yield partial(prefill_case, backend, shape, length, device)
            yield partial(small_chunk_case, backend, shape, device)
            yield from elementwise_cases(backend, shape, device)
            yield from invariant_cases(backend.products, shape, device)

        self.measure_cases("kernels", "Kernels", cases())

    def measure_quantised(self) -> None:
        from benchmarks.gpu.held import held_cases

        cases = held_cases(self.backend.products, self.shape, self.device)
        self.measure_cases("quantised", "Products with quantised weights", cases)

    def measure_experts(self) -> None:
        from benchmarks.gpu.held import dense_experts_cases, experts_cases

        def cases() -> Iterator[MakeCase]:
            yield from dense_experts_cases(self.backend.products, self.shape, self.device)
            yield from experts_cases(self.backend.products, self.shape, self.device)

        self.measure_cases("moe", "Mixtures of experts", cases())

    def measure_latents(self) -> None:
        from benchmarks.gpu.latents import latent_cases

        self.measure_cases("mla", "Attention over latents", latent_cases(self.backend, self.shape, self.device))

    def check_graphs(self) -> None:
        from benchmarks.gpu.engine import engine_problem
        from benchmarks.gpu.node.graphs import bucket_rows, of_bucket

        problem = engine_problem(self._few_layers, self.device)
        self._note("graphs", "recorded decode steps fed by each other", problem)
        rows = bucket_rows(self._few_layers, self.device, self._most_rows)
        self.judge_rows("graphs", rows, lambda row: of_bucket(row, self.shape.dtype))

    def measure_transfer(self) -> None:
        from benchmarks.gpu.transfer import measure_transfer

        rows = [*self.keep("transfer", measure_transfer(self.shape, self.timer))]
        report.print_rows("KV transfer, GB/s", rows)
        for one in (*verdict.of_transfer(rows), *verdict.of_hiding(rows, self._kv_rate())):
            self.record(one)

    def check_ipc(self) -> None:
        if self.device.type != "cuda":
            self.record(Verdict("ipc", "memory that GPUs share", True, "not tried", "", "no GPU"))
            return
        from benchmarks.gpu.node.ipc import ipc_rows

        self.judge_rows("ipc", ipc_rows(self.shape, self.device), verdict.of_ipc)

    def measure_serving(self) -> None:
        from benchmarks.gpu.serving import measure_serving

        self._require_agreement()
        options, in_flight = self.options, self.shape.serving[2]
        rows = measure_serving(
            self.shape,
            self.device,
            kv_memory_gib=DRY_KV_MEMORY_GIB if options.dry_run else options.kv_memory_gib,
            num_requests=in_flight if options.dry_run or options.quick else options.requests,
            log_dir=self._own.logs,
        )
        for row in self.keep("serving", rows):
            self.record(verdict.of_serving(row, self._step_ms()))

    def check_landing(self) -> None:
        from benchmarks.gpu.node.landing import measure_landing, of_landing

        row = measure_landing(self._few_layers, self.device, self.options.landing_s)
        self.judge_rows("landing", [row], of_landing)

    def check_invariance(self) -> None:
        from benchmarks.gpu.node.invariance import invariance_rows, of_invariance

        self.judge_rows("invariance", invariance_rows(self._few_layers, self.device, self._most_rows), of_invariance)

    def check_families(self) -> None:
        from benchmarks.gpu.node.families import FAMILIES, family_rows, of_family

        families = () if self.options.dry_run else FAMILIES[1:]
        self.judge_rows("families", family_rows(families, self.device), of_family)

    def check_boxes(self) -> None:
        from benchmarks.gpu.node.boxes import box_rows, of_boxes

        self.judge_rows("boxes", box_rows(self.shape, self.timer, short=self.options.dry_run), of_boxes)

    def count_launches(self) -> None:
        from benchmarks.gpu.node.launches import launch_rows, of_launches

        self.judge_rows("launches", launch_rows(self._few_layers, self.device), of_launches)

    def check_ranks(self) -> None:
        import torch

        from benchmarks.gpu.node.ranks import RANKS, of_ranks, ranks_row, too_few

        count = 0 if self.options.dry_run else torch.cuda.device_count()
        if count >= RANKS or self.options.dry_run:
            self.judge_rows("ranks", [ranks_row(self.device, self._own.progress.parent)], of_ranks)
        else:
            self.record(too_few(count))

    def measure_tiles(self) -> None:
        from benchmarks.gpu.tiles import measure_tiles

        rows = [*self.keep("tiles", measure_tiles(self.shape, self.chip, self.timer))]
        report.print_rows("Attention with other tiles", rows)

    # ---------------------------------------------------------------- results that other parts use

    @property
    def _most_rows(self) -> int:
        return DRY_BUCKETS if self.options.dry_run else BUCKETS

    def _kv_rate(self) -> float:
        """Bytes of KV a second that the longest prefill of the engine made; 0: not measured."""
        rows = self.found.get("engine", {}).get("prefill", ())
        per_token = self.shape.token_bytes * self.shape.num_layers
        return float(rows[-1]["tokens_per_s"]) * per_token if rows else 0.0

    def _step_ms(self) -> float:
        """Of the engine, with as many requests as the service has in flight; 0: not measured."""
        rows = self.found.get("engine", {}).get("decode", ())
        fitting = (row for row in rows if not row["skipped"] and row["batch"] == self.shape.serving[2])
        return next((float(row["ms"]) for row in fitting if row["how"] == "recorded"), 0.0)


def split(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split the arguments into those of the controlling process and the options of the run."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--left-s", type=float, default=0.0)
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    own, rest = split(argv)
    options = parse(rest)
    with ExitStack() as stack:
        try:
            import torch

            if not options.dry_run and not torch.cuda.is_available():
                print("No CUDA device was found, so nothing was measured. --dry-run tries every part.", flush=True)
                return NO_GPU
            stack.enter_context(torch.inference_mode())
            run = PartsRun(options, own, rest)
            if options.dry_run:
                from benchmarks.gpu.interpreter import products_by_row

                stack.enter_context(products_by_row())
        except ImportError as error:
            own.progress.write_text(json.dumps(json.loads(own.progress.read_text()) | {"problem": str(error)}))
            return FAILED
        try:
            return PASSED if run.run() else FAILED
        except DeviceLost:
            return LOST


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(status)
