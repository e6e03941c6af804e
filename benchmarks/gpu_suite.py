"""What `benchmarks/gpu.py` does, in order: the chip, the gate, and the sections that were asked for."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from diptych.benchmarks import gpu_report as report
from diptych.benchmarks.conditions import conditions
from diptych.benchmarks.gpu_attention import awkward_problem, decode_case, prefill_case
from diptych.benchmarks.gpu_case import KernelCase
from diptych.benchmarks.gpu_chip import Chip, measure_chip, versions
from diptych.benchmarks.gpu_elementwise import elementwise_cases
from diptych.benchmarks.gpu_engine import engine_problem, measure_engine
from diptych.benchmarks.gpu_gate import poisoned
from diptych.benchmarks.gpu_serving import measure_serving
from diptych.benchmarks.gpu_shape import DRY, LLAMA_8B
from diptych.benchmarks.gpu_timer import Timer
from diptych.benchmarks.gpu_transfer import measure_transfer
from diptych.benchmarks.report import open_console, write_json
from diptych.kernels import dispatch, triton_backend

PROGRAM = "python -m diptych.benchmarks.gpu"
QUICK_REPEATS, REPEATS = 10, 40
QUICK_DECODE_STEPS = 16
CHECKED_LAYERS = 2
DRY_KV_MEMORY_GIB = 0.01


class Suite:
    """One run with its options. In a dry run Triton must have been imported with its interpreter on."""

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
        self.found: dict[str, Any] = {
            "conditions": conditions(PROGRAM, argv) | versions(self.device),
            "dry_run": options.dry_run,
        }

    def run(self, path: Path | None) -> bool:
        """Whether every check passed; only then anything is timed. The results go to `path`, if there is one."""
        torch.manual_seed(datetime.now(UTC).microsecond)
        chip = measure_chip(self.shape, self.timer)
        self.found["chip"] = asdict(chip)
        report.print_chip(self.console, chip, self.found["conditions"])
        problems = self.problems()
        report.print_problems(self.console, problems)
        self.found["problems"] = problems
        passed = not any(problems.values())
        if passed:
            self.measure(chip)
        if path is not None:
            write_json(path, self.found)
            self.console.print(f"wrote {path}", highlight=False)
        return passed

    def problems(self) -> dict[str, str]:
        """By what was checked: what is wrong with it, or "". Everything is, whatever is to be measured."""
        with poisoned():
            awkward = awkward_problem(triton_backend, self.shape, self.device, short=self.options.dry_run)
        problems = {"attention of awkward lengths": awkward}
        for case in self.cases():
            problems[f"{case.name}, {case.size}"] = case.problem()
        few_layers = replace(self.shape, num_layers=CHECKED_LAYERS)
        problems["recorded decode steps"] = engine_problem(few_layers, self.device)
        return problems

    def cases(self) -> Iterator[KernelCase]:
        """Every kernel in turn: the inputs of one are gone when the next is made."""
        shape, device = self.shape, self.device
        for batch in shape.decode_batches:
            yield decode_case(triton_backend, shape, batch, device)
        for length in shape.prefill_lengths:
            yield prefill_case(triton_backend, shape, length, device)
        yield from elementwise_cases(triton_backend, shape, device)

    def measure(self, chip: Chip) -> None:
        """The sections that were asked for, each printed when it is done."""
        only, shape, found = self.options.only, self.shape, self.found
        if "kernels" in only:
            found["kernels"] = [case.measure(chip, self.timer) for case in self.cases()]
            report.print_kernels(self.console, found["kernels"])
        if "engine" in only:
            found["engine"] = measure_engine(shape, chip, self.timer)
            report.print_engine(self.console, found["engine"])
        self._release()
        if "transfer" in only:
            found["transfer"] = measure_transfer(shape, self.timer)
            report.print_rows(self.console, "KV transfer, GB/s", found["transfer"])
        self._release()
        if "serving" in only:
            found["serving"] = self._serving()
            report.print_rows(self.console, "The service on one device", found["serving"])

    def _serving(self) -> list[dict[str, Any]]:
        options, in_flight = self.options, self.shape.serving[2]
        return measure_serving(
            self.shape,
            self.device,
            kv_memory_gib=DRY_KV_MEMORY_GIB if options.dry_run else options.kv_memory_gib,
            num_requests=in_flight if options.dry_run or options.quick else options.requests,
            log_dir=options.log_dir,
        )

    def _release(self) -> None:
        """Give memory that nobody uses back, for the processes that come next."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
