"""How far two simulations of the same requests are from each other: what a deviation from a real run has to be beside.

    python -m benchmarks.reality.chance reality.json --traces FOLDER

The file is a result of `python -m benchmarks.reality`. Each of its runs is simulated several times with the
coefficients that were measured then; the noise of steps is drawn anew, and each request comes later by up to what the
load generator of the real run was late at its p99. A simulation cannot tell a real value within the range of these
draws from its own.
"""

from __future__ import annotations

import json
import random
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from benchmarks.load.report import open_console, print_table
from benchmarks.load.trace import TraceRow
from benchmarks.reality.loads import LOADS, LoadKind
from benchmarks.reality.numbers import MARK, Fate, Numbers
from benchmarks.reality.twin import Twin
from benchmarks.script import run, write_result

PROGRAM: Final = "python -m benchmarks.reality.chance"
VALUES: Final = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
COLUMNS: Final = ("run", "", *VALUES, "real within")


@dataclass(frozen=True, slots=True)
class Chance:
    """The draws of one run by one twin: each value of the real run, and of the draws the least, median and most."""

    run: str
    source: str
    real: Mapping[str, float]
    draws: Sequence[Mapping[str, float]]

    def range_of(self, name: str) -> tuple[float, float, float]:
        values = sorted(draw[name] for draw in self.draws)
        return values[0], median(values), values[-1]

    def is_within(self, name: str) -> bool:
        least, _, most = self.range_of(name)
        return least <= self.real[name] <= most

    def deviates(self, name: str) -> bool:
        """Whether the median of the draws is beyond the mark."""
        return abs(self.range_of(name)[1] / self.real[name] - 1) > MARK

    @property
    def cells(self) -> tuple[str, ...]:
        shown = ("{:,.0f} to {:,.0f}".format(*self.range_of(name)[::2]) for name in VALUES)
        return (*shown, f"{sum(map(self.is_within, VALUES))} of {len(VALUES)}")


def moved(rows: Sequence[TraceRow], late_s: float, seed: int) -> list[TraceRow]:
    """The same requests, each later by a time that chance chooses below `late_s`."""
    chance = random.Random(f"{seed}/late")
    later = (replace(row, arrival_s=row.arrival_s + chance.uniform(0.0, late_s)) for row in rows)
    return sorted(later, key=lambda row: row.arrival_s)


def chances(result: Mapping[str, Any], options: Namespace, folder: Path) -> Iterator[Chance]:
    """Each run of a result by each twin of its case. Raises TraceError."""
    done, loads = result["conditions"], {load.name: load for load in LOADS}
    twins = [msgspec.convert(twin, Twin) for twin in result["twins"]]
    for found in result["runs"]:
        load = loads[found["load"]]
        for twin in (twin for twin in twins if twin.case.name == found["case"]):
            rows = load.rows(twin.case, done["seconds"], options.traces, done["seed"], done.get("begin", 0.0))
            draws = [_drawn(twin, load, rows, found, seed, folder) for seed in range(1, options.draws + 1)]
            name = " ".join((found["case"], found["load"], found["policy"]))
            yield Chance(name, twin.source, _values(found["real"]["numbers"]), draws)


def _drawn(
    twin: Twin, load: LoadKind, rows: Sequence[TraceRow], found: Mapping[str, Any], seed: int, folder: Path
) -> dict[str, float]:
    some = moved(rows, found["late_p99_ms"] / 1000, seed)
    fates: Sequence[Fate] = twin.simulate(some, folder, policy=found["policy"], seed=seed, id_tokens=load.id_tokens)
    return Numbers.of(fates, twin.case.ttft_ms, twin.case.tpot_ms).values


def _values(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: numbers[f"{name[:4].lower()}_ms"][name[5:]] for name in VALUES}


def parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(PROGRAM, description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON that benchmarks.reality wrote")
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="folder with the trace files")
    parser.add_argument("--draws", type=int, default=10, help="simulations of each run")
    parser.add_argument("--output", type=Path, help="write the ranges to this JSON file")
    options = parser.parse_args(argv)
    if options.draws < 2:
        parser.error(f"argument --draws: {options.draws} is less than 2")
    return options


def main(argv: Sequence[str]) -> int:
    """Exit status 0, whatever is within a range."""
    options, console = parse(argv), open_console()
    result = json.loads(options.result.read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = []
    found: list[Chance] = []
    with tempfile.TemporaryDirectory(prefix="diptych-chance-") as folder:
        for one in chances(result, options, Path(folder)):
            if not found or found[-1].run != one.run:
                rows.append((one.run, "real", *(f"{one.real[name]:,.0f}" for name in VALUES), ""))
            rows.append(("", one.source, *one.cells))
            found.append(one)
    print_table(console, f"{options.draws} simulations of each run, ms", COLUMNS, rows, left=(0, 1))
    values = [(one, name) for one in found for name in VALUES]
    beyond = [(one, name) for one, name in values if one.deviates(name)]
    num_within = sum(one.is_within(name) for one, name in values)
    told = f"{num_within} of {len(values)} real values are within the draws; the median of {len(beyond)} is off by more"
    console.print(f"{told} than {MARK:.0%}", highlight=False)
    ranges = [
        {"run": one.run, "source": one.source, "real": one.real, "draws": {n: one.range_of(n) for n in VALUES}}
        for one in found
    ]
    write_result(options, PROGRAM, argv, {"draws": options.draws, "of": result["conditions"]["date"], "runs": ranges})
    return 0


if __name__ == "__main__":
    run(main)
