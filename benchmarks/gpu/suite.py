"""The parts of `benchmarks/gpu/__main__.py` in order: the chip, the checks, and the sections of `--only`."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.attention import awkward_problem, decode_case, prefill_case, small_chunk_case
from benchmarks.gpu.case import KernelCase, MakeCase, words_of
from benchmarks.gpu.chip import measure_chip, numbered, versions
from benchmarks.gpu.elementwise import elementwise_cases
from benchmarks.gpu.engine import engine_problem, measure_engine
from benchmarks.gpu.gate import poisoned
from benchmarks.gpu.held import experts_cases, held_cases, invariant_cases
from benchmarks.gpu.serving import measure_serving
from benchmarks.gpu.shape import DRY, LLAMA_8B
from benchmarks.gpu.tiles import measure_tiles
from benchmarks.gpu.timer import Timer
from benchmarks.gpu.transfer import measure_transfer
from benchmarks.load.conditions import conditions
from benchmarks.load.report import open_console, write_json
from benchmarks.time_limit import TimeOver
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend

PROGRAM = "python -m benchmarks.gpu"
QUICK_REPEATS, REPEATS = 10, 40
QUICK_DECODE_STEPS = 16
CHECKED_LAYERS = 2
DRY_KV_MEMORY_GIB = 0.01
BLOCK_COPIES = ("gather blocks", "scatter blocks")


class Unchecked(RuntimeError):
    """A part is not measured, because it runs kernels that did not pass."""


class DeviceLost(RuntimeError):
    """The device no longer answers this process, as after a kernel with an illegal read."""


class Suite:
    """One run with its options. In a dry run Triton must have been imported with its interpreter on.

    The suite notes a part that fails in `found`, goes on with the others, and writes each figure to `path` at once.
    """

    def __init__(self, options: Namespace, argv: Sequence[str], path: Path | None) -> None:
        self.options, self.path, self.console = options, path, open_console()
        self.device = torch.device("cpu") if options.dry_run else numbered(torch.device(options.device))
        if options.dry_run:
            FOUND["cpu"] = triton_backend
        else:
            torch.cuda.set_device(self.device)
        self.shape = DRY if options.dry_run else LLAMA_8B
        if options.quick:
            few = self.shape.prefill_lengths[:2]
            self.shape = replace(self.shape, prefill_lengths=few, decode_steps=QUICK_DECODE_STEPS)
        self.timer = Timer(self.device, 1 if options.dry_run else QUICK_REPEATS if options.quick else REPEATS)
        self.problems: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.found: dict[str, Any] = {
            "conditions": conditions(PROGRAM, argv) | versions(self.device),
            "dry_run": options.dry_run,
            "problems": self.problems,
            "errors": self.errors,
            "seconds": self.seconds,
        }

    def run(self) -> bool:
        """Whether every check passed and everything was measured."""
        torch.manual_seed(datetime.now(UTC).microsecond)
        try:
            for name, part in self.parts().items():
                self._run(name, part)
                if "chip" in self.errors:
                    break  # every floor derives from it
        except (TimeOver, DeviceLost) as end:
            self.errors["end"] = words_of(end)
            self.console.print(f"STOPPED  {end}: missing figures were not measured", highlight=False, markup=False)
        self.save()
        if self.path is not None:
            self.console.print(f"wrote {self.path}", highlight=False)
        return not self.errors and not any(self.problems.values())

    def parts(self) -> dict[str, Callable[[], None]]:
        """The parts of the run, in order."""
        sections = {
            "kernels": self.measure_kernels,
            "engine": self.measure_engine,
            "transfer": self.measure_transfer,
            "serving": self.measure_serving,
            "tiles": self.measure_tiles,
        }
        chosen = {name: section for name, section in sections.items() if name in self.options.only}
        return {"chip": self.measure_chip, "checks": self.check} | chosen

    def ended(self, name: str) -> None:
        """Called after each part, whether it failed or not."""

    def save(self) -> None:
        if self.path is not None:
            write_json(self.path, self.found)

    def measure_chip(self) -> None:
        self.chip = measure_chip(self.shape, self.timer)
        self.found["chip"] = asdict(self.chip)
        report.print_chip(self.console, self.chip, self.found["conditions"])

    def check(self) -> None:
        """Check everything, also parts that are not measured."""
        short, few_layers = self.options.dry_run, replace(self.shape, num_layers=CHECKED_LAYERS)
        awkward = partial(awkward_problem, triton_backend, self.shape, self.device, short=short)
        try:
            with poisoned():
                self._note("attention of awkward lengths", awkward)
            for make in self.cases():
                self._check_case(make)
            self._note("recorded decode steps", partial(engine_problem, few_layers, self.device))
        finally:
            report.print_problems(self.console, self.problems)

    def cases(self) -> Iterator[MakeCase]:
        """Every kernel in turn; the inputs of one are freed before the next is made."""
        shape, device = self.shape, self.device
        for batch in shape.decode_batches:
            yield partial(decode_case, triton_backend, shape, batch, device)
        for length in shape.prefill_lengths:
            yield partial(prefill_case, triton_backend, shape, length, device)
        yield partial(small_chunk_case, triton_backend, shape, device)
        yield from elementwise_cases(triton_backend, shape, device)
        yield from held_cases(triton_backend.products, shape, device)
        yield from experts_cases(triton_backend.products, shape, device)
        yield from invariant_cases(triton_backend.products, shape, device)

    def measure_kernels(self) -> None:
        """Time the kernels that passed; a failure does not stop the others."""
        rows: list[dict[str, Any]] = []
        self.found["kernels"] = rows
        try:
            for make in self.cases():
                case = make()
                if self.problems.get(name_of(case), "unchecked"):
                    continue
                try:
                    rows.append(case.measure(self.chip, self.timer))
                except Exception as error:
                    self._failed(f"timing {name_of(case)}", error)
                self.save()
                del case
        finally:
            if rows:
                report.print_kernels(self.console, rows)

    def measure_engine(self) -> None:
        self._require_checks()
        found: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        self.found["engine"] = found
        try:
            for kind, row in measure_engine(self.shape, self.chip, self.timer):
                found[kind].append(row)
                self.save()
        finally:
            report.print_engine(self.console, found)

    def measure_transfer(self) -> None:
        self.keep("transfer", "KV transfer, GB/s", measure_transfer(self.shape, self.timer))

    def measure_serving(self) -> None:
        self._require_checks()
        options, in_flight = self.options, self.shape.serving[2]
        rows = measure_serving(
            self.shape,
            self.device,
            kv_memory_gib=DRY_KV_MEMORY_GIB if options.dry_run else options.kv_memory_gib,
            num_requests=in_flight if options.dry_run or options.quick else options.requests,
            log_dir=options.log_dir,
        )
        self.keep("serving", "The service on one device", rows)

    def measure_tiles(self) -> None:
        self.keep("tiles", "Attention with other tiles", measure_tiles(self.shape, self.chip, self.timer))

    def keep(self, name: str, title: str, rows: Iterable[dict[str, Any]]) -> None:
        """Save each row as it comes, because a later one may fail or take too long."""
        kept: list[dict[str, Any]] = []
        self.found[name] = kept
        try:
            for row in rows:
                kept.append(row)
                self.save()
        finally:
            report.print_rows(self.console, title, kept)

    def _require_checks(self) -> None:
        """Raise Unchecked unless all kernels passed, but for block copies on the device, which serving does not use."""
        wrong = [name for name, problem in self.problems.items() if problem and not name.startswith(BLOCK_COPIES)]
        if wrong or "checks" in self.errors:
            raise Unchecked(f"not measured, because these checks failed: {', '.join(wrong) or self.errors['checks']}")

    def _run(self, name: str, part: Callable[[], None]) -> None:
        """Run one part and record its duration and its failure."""
        began = time.monotonic()
        try:
            part()
        except DeviceLost:
            raise
        except Exception as error:
            self._failed(name, error)
        finally:
            self.seconds[name] = round(time.monotonic() - began, 1)
            self.save()
            self.ended(name)
        self.console.print(f"{name}: {self.seconds[name]:,.1f} s", highlight=False)
        self._release()

    def _check_case(self, make: MakeCase) -> None:
        try:
            case = make()
        except Exception as error:
            self._wrong(f"inputs of {getattr(make, 'func', make).__name__}", error)
        else:
            self._note(name_of(case), case.problem)

    def _note(self, name: str, check: Callable[[], str]) -> None:
        """Record the result of a check, unless `--skip` leaves it out."""
        if any(word in name for word in self.options.skip):
            return
        try:
            self.problems[name] = check()
        except Exception as error:
            self._wrong(name, error)
        self.save()

    def _wrong(self, name: str, error: Exception) -> None:
        """Record a check that raised."""
        self.problems[name] = words_of(error)
        self._tell(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.errors[name] = words_of(error)
        self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        """Print the whole traceback, because the device may be lost. Called while `error` is handled."""
        self.console.print(f"FAILED  {name}: {words_of(error)}", highlight=False, markup=False)
        if isinstance(error, Unchecked):
            return
        self.console.print_exception(max_frames=8)
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:
                raise DeviceLost(f"the device was lost by {name}") from lost

    def _release(self) -> None:
        """Free unused memory for the next processes."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def name_of(case: KernelCase) -> str:
    """The name of a check."""
    return f"{case.name}, {case.size}"
