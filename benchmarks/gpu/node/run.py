"""The parts of `make gpu`, the most important first: a run that is cut short has told those."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.node import PARTS, verdict
from benchmarks.gpu.node.boxes import box_rows, of_boxes
from benchmarks.gpu.node.families import DRY, FAMILIES, family_of, family_row, family_rows, of_family
from benchmarks.gpu.node.graphs import bucket_rows, of_bucket
from benchmarks.gpu.node.invariance import invariance_rows, of_invariance
from benchmarks.gpu.node.ipc import ipc_rows
from benchmarks.gpu.node.landing import measure_landing, of_landing
from benchmarks.gpu.node.launches import launch_rows, of_launches
from benchmarks.gpu.node.ranks import RANKS, of_ranks, ranks_row, too_few
from benchmarks.gpu.node.verdict import Verdict, of_ipc
from benchmarks.gpu.suite import CHECKED_LAYERS, Suite
from common.config.decode_worker import MOST_SEQS

DRY_BUCKETS = 2
DRY_TOKENS = 640
SPEEDS = ("chip", "kernels", "engine", "serving", "transfer")
"""Parts whose thresholds are for chips: a dry run shows that they work, and judges nothing."""


class NodeRun(Suite):
    """A `Suite` whose parts give a verdict each, told and written at once."""

    def __init__(self, options: Namespace, argv: Sequence[str], folder: Path) -> None:
        super().__init__(options, argv, folder / "gpu.json")
        self.folder, self.verdicts = folder, list[Verdict]()
        self._lines = folder / "verdicts.txt"
        self._lines.write_text("")
        self._few_layers = replace(self.shape, num_layers=CHECKED_LAYERS)

    def parts(self) -> dict[str, Callable[[], None]]:
        known: dict[str, Callable[[], None]] = {
            "chip": self.measure_chip,
            "agreement": self.check_agreement,
            "graphs": self.check_graphs,
            "invariance": self.check_invariance,
            "landing": self.check_landing,
            "checks": self.check,
            "kernels": self.measure_kernels,
            "boxes": self.check_boxes,
            "launches": self.count_launches,
            "engine": self.measure_engine,
            "serving": self.measure_serving,
            "transfer": self.measure_transfer,
            "ipc": self.check_ipc,
            "families": self.check_families,
            "ranks": self.check_ranks,
        }
        return {name: known[name] for name in PARTS if name in ("chip", *self.options.parts)}

    def check_agreement(self) -> None:
        """The check of a worker's start, at the shape of the benchmark's model."""
        if self.options.dry_run:
            rows = [family_row(DRY, self.shape.dtype, self.device, DRY_TOKENS)]
        else:
            rows = [family_row(family_of(self.shape), self.shape.dtype, self.device)]
        self.judge_rows("agreement", rows, of_family)

    def check_graphs(self) -> None:
        rows = bucket_rows(self._few_layers, self.device, self._most_rows)
        self.judge_rows("graphs", rows, lambda row: of_bucket(row, self.shape.dtype))

    def check_invariance(self) -> None:
        rows = invariance_rows(self._few_layers, self.device, self._most_rows)
        self.judge_rows("invariance", rows, of_invariance)

    def check_landing(self) -> None:
        row = measure_landing(self._few_layers, self.device, self.options.landing_s)
        self.judge_rows("landing", [row], of_landing)

    def check_ipc(self) -> None:
        if self.device.type == "cuda":
            self.judge_rows("ipc", ipc_rows(self.shape, self.device), of_ipc)
        else:
            self.tell(Verdict("ipc", "memory that GPUs share", True, "not tried", "", "no GPU"))

    def check_boxes(self) -> None:
        self.judge_rows("boxes", box_rows(self.shape, self.timer, short=self.options.dry_run), of_boxes)

    def count_launches(self) -> None:
        self.judge_rows("launches", launch_rows(self._few_layers, self.device), of_launches)

    def check_families(self) -> None:
        families = () if self.options.dry_run else FAMILIES[1:]
        self.judge_rows("families", family_rows(families, self.device), of_family)

    def check_ranks(self) -> None:
        count = 0 if self.options.dry_run else torch.cuda.device_count()
        if count >= RANKS or self.options.dry_run:
            self.judge_rows("ranks", [ranks_row(self.device, self.folder)], of_ranks)
        else:
            self.tell(too_few(count))

    def judge_rows(self, name: str, rows: Iterable[dict[str, Any]], judge: Callable[[dict[str, Any]], Verdict]) -> None:
        """Keep and judge each row as it comes."""
        kept: list[dict[str, Any]] = []
        self.found[name] = kept
        for row in rows:
            kept.append(row)
            self.tell(judge(row))

    def ended(self, name: str) -> None:
        """Judge what the part has measured, a part that failed too."""
        for one in self._judged(name):
            self.tell(one._replace(skipped="a dry run") if self.options.dry_run and name in SPEEDS else one)
        if name in self.errors:
            self.tell(Verdict(name, "the part itself", False, self.errors[name], "no error"))

    def tell(self, one: Verdict) -> None:
        """On the screen, in the file of verdicts and in the JSON file."""
        self.verdicts.append(one)
        self.found["verdicts"] = [each._asdict() | {"line": str(each)} for each in self.verdicts]
        self.console.print(str(one), highlight=False, markup=False)
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(f"{one}\n")
        self.save()

    @property
    def passed(self) -> bool:
        return all(one.ok or one.skipped for one in self.verdicts)

    def _judged(self, name: str) -> Iterable[Verdict]:
        found = self.found
        if name == "chip" and name not in self.errors:
            return verdict.of_chip(self.chip)
        if name == "checks":
            return [
                Verdict("checks", check, not problem, problem or "agrees", "the reference's numbers")
                for check, problem in self.problems.items()
            ]
        if name == "kernels":
            return verdict.of_kernels(found.get(name, ()))
        if name == "engine" and name in found:
            return verdict.of_engine(found[name])
        if name == "transfer":
            rows = found.get(name, ())
            return (*verdict.of_transfer(rows), *verdict.of_hiding(rows, self._kv_rate()))
        if name == "serving":
            return verdict.of_serving(found.get(name, ()), self._step_ms())
        return ()

    @property
    def _most_rows(self) -> int:
        """The largest batch that a decode worker records steps for by default; all sizes up to it are compared."""
        return DRY_BUCKETS if self.options.dry_run else MOST_SEQS

    def _kv_rate(self) -> float:
        """Bytes of KV a second that the longest prefill of the engine made; 0: not measured."""
        rows = self.found.get("engine", {}).get("prefill", ())
        per_token = self.shape.token_bytes * self.shape.num_layers
        return float(rows[-1]["tokens_per_s"]) * per_token if rows else 0.0

    def _step_ms(self) -> float:
        """Of the engine, with as many requests as the service has in flight; 0: not measured."""
        rows = self.found.get("engine", {}).get("decode", ())
        return next((r["ms"] for r in rows if r["how"] == "recorded" and r["batch"] == self.shape.serving[2]), 0.0)
