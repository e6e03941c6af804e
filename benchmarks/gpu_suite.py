"""What `benchmarks/gpu.py` does, in order: the chip, the checks, and the sections that were asked for."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diptych.benchmarks import gpu_report as report
from diptych.benchmarks.conditions import conditions
from diptych.benchmarks.gpu_attention import awkward_problem, decode_case, prefill_case
from diptych.benchmarks.gpu_case import MakeCase, words_of
from diptych.benchmarks.gpu_chip import measure_chip, versions
from diptych.benchmarks.gpu_elementwise import elementwise_cases
from diptych.benchmarks.gpu_engine import engine_problem, measure_engine
from diptych.benchmarks.gpu_gate import poisoned
from diptych.benchmarks.gpu_serving import measure_serving
from diptych.benchmarks.gpu_shape import DRY, LLAMA_8B
from diptych.benchmarks.gpu_tiles import measure_tiles
from diptych.benchmarks.gpu_timer import Timer
from diptych.benchmarks.gpu_transfer import measure_transfer
from diptych.benchmarks.report import open_console, write_json
from diptych.kernels import dispatch, triton_backend

PROGRAM = "python -m diptych.benchmarks.gpu"
QUICK_REPEATS, REPEATS = 10, 40
QUICK_DECODE_STEPS = 16
CHECKED_LAYERS = 2
DRY_KV_MEMORY_GIB = 0.01


class Unchecked(RuntimeError):
    """What is to be measured runs kernels that did not pass."""


class Suite:
    """One run with its options. In a dry run Triton must have been imported with its interpreter on.

    A part that fails is noted in `found`, and the others follow.
    """

    def __init__(self, options: Namespace, argv: Sequence[str]) -> None:
        self.options, self.console = options, open_console()
        self.device = torch.device("cpu" if options.dry_run else options.device)
        if options.dry_run:
            dispatch.backend = lambda kind: triton_backend  # type: ignore[assignment]
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

    def run(self, path: Path | None) -> bool:
        """Whether every check passed and everything was measured. The results so far go to `path` after each part."""
        torch.manual_seed(datetime.now(UTC).microsecond)
        parts: dict[str, Callable[[], None]] = {"chip": self.measure_chip, "checks": self.check}
        sections = {
            "kernels": self.measure_kernels,
            "engine": self.measure_engine,
            "transfer": self.measure_transfer,
            "serving": self.measure_serving,
            "tiles": self.measure_tiles,
        }
        parts |= {name: section for name, section in sections.items() if name in self.options.only}
        for name, part in parts.items():
            self._run(name, part)
            if path is not None:
                write_json(path, self.found)
            if "chip" in self.errors:
                break  # every floor is made of it
        if path is not None:
            self.console.print(f"wrote {path}", highlight=False)
        return not self.errors and not any(self.problems.values())

    def measure_chip(self) -> None:
        self.chip = measure_chip(self.shape, self.timer)
        self.found["chip"] = asdict(self.chip)
        report.print_chip(self.console, self.chip, self.found["conditions"])

    def check(self) -> None:
        """Everything, whatever is to be measured: what is wrong with it, or ""."""
        short, few_layers = self.options.dry_run, replace(self.shape, num_layers=CHECKED_LAYERS)
        awkward = partial(awkward_problem, triton_backend, self.shape, self.device, short=short)
        with poisoned():
            self.problems["attention of awkward lengths"] = self._problem(awkward)
        for make in self.cases():
            name, problem = self._case_problem(make)
            self.problems[name] = problem
        self.problems["recorded decode steps"] = self._problem(partial(engine_problem, few_layers, self.device))
        report.print_problems(self.console, self.problems)

    def cases(self) -> Iterator[MakeCase]:
        """Every kernel in turn: the inputs of one are gone when the next is made."""
        shape, device = self.shape, self.device
        for batch in shape.decode_batches:
            yield partial(decode_case, triton_backend, shape, batch, device)
        for length in shape.prefill_lengths:
            yield partial(prefill_case, triton_backend, shape, length, device)
        yield from elementwise_cases(triton_backend, shape, device)

    def measure_kernels(self) -> None:
        """Those that passed."""
        rows: list[dict[str, Any]] = []
        self.found["kernels"] = rows
        try:
            for make in self.cases():
                case = make()
                if not self.problems.get(f"{case.name}, {case.size}", "unchecked"):
                    rows.append(case.measure(self.chip, self.timer))
        finally:
            if rows:
                report.print_kernels(self.console, rows)

    def measure_engine(self) -> None:
        self._require_checks()
        self.found["engine"] = measure_engine(self.shape, self.chip, self.timer)
        report.print_engine(self.console, self.found["engine"])

    def measure_transfer(self) -> None:
        self.found["transfer"] = measure_transfer(self.shape, self.timer)
        report.print_rows(self.console, "KV transfer, GB/s", self.found["transfer"])

    def measure_serving(self) -> None:
        self._require_checks()
        options, in_flight = self.options, self.shape.serving[2]
        self.found["serving"] = measure_serving(
            self.shape,
            self.device,
            kv_memory_gib=DRY_KV_MEMORY_GIB if options.dry_run else options.kv_memory_gib,
            num_requests=in_flight if options.dry_run or options.quick else options.requests,
            log_dir=options.log_dir,
        )
        report.print_rows(self.console, "The service on one device", self.found["serving"])

    def measure_tiles(self) -> None:
        self.found["tiles"] = measure_tiles(self.shape, self.chip, self.timer)
        report.print_rows(self.console, "Attention with other tiles", self.found["tiles"])

    def _require_checks(self) -> None:
        wrong = [name for name, problem in self.problems.items() if problem]
        if wrong or "checks" in self.errors:
            raise Unchecked(f"not measured, for what is wrong: {', '.join(wrong) or self.errors['checks']}")

    def _run(self, name: str, part: Callable[[], None]) -> None:
        """One part: how long it took, and what it failed of, are results too."""
        began = time.monotonic()
        try:
            part()
        except Exception as error:
            self.errors[name] = words_of(error)
            self.console.print(f"FAILED  {name}: {error}", highlight=False, markup=False)
            if not isinstance(error, Unchecked):
                self.console.print_exception(max_frames=8)
        self._release()
        self.seconds[name] = round(time.monotonic() - began, 1)
        self.console.print(f"{name}: {self.seconds[name]:,.1f} s", highlight=False)

    @staticmethod
    def _problem(check: Callable[[], str]) -> str:
        try:
            return check()
        except Exception as error:
            return words_of(error)

    @staticmethod
    def _case_problem(make: MakeCase) -> tuple[str, str]:
        """A case's name, and what is wrong with it."""
        try:
            case = make()
        except Exception as error:
            return f"inputs of {getattr(make, 'func', make).__name__}", words_of(error)
        return f"{case.name}, {case.size}", Suite._problem(case.problem)

    def _release(self) -> None:
        """Give memory that nobody uses back, for the processes that come next."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
