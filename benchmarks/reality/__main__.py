"""Does the simulator tell what a real cluster does? Both get the same requests, and their latencies are compared.

    python -m benchmarks.reality --traces FOLDER

For each case a cluster of paced workers (`paced.py`) is started: real processes, sockets, schedulers and KV bytes. At
idle it is measured what messages, transfers and HTTP take; then each load is replayed, on one cluster also with other
policies. `diptych simulate`'s simulator gets the same requests, settings and goals twice: `file` with the
coefficients by which the workers sleep, `fit` with those that the workers report after the first load, so that all
other loads are held out. A table shows latencies and goodput of both, and what is beyond the marks: 10 % for p50 and
p99 of TTFT and TPOT, 5 % for goodput. Nothing else should use the machine's cores meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from benchmarks.load.report import open_console, print_table
from benchmarks.load.trace import TraceRow
from benchmarks.reality.cluster import Cluster, RealRun
from benchmarks.reality.loads import CASES, LOADS, Case, LoadKind
from benchmarks.reality.numbers import Fate, Numbers, deviations, misses, pairs_ranked_alike
from benchmarks.reality.twin import Twin, alone_rows
from benchmarks.script import run, script_parser, settings_of, write_result
from benchmarks.simulator.policies import POLICIES

PROGRAM: Final = "python -m benchmarks.reality"
USUAL: Final = "diptych"
NOISE_OF_ERROR: Final = 1.25
"""The standard deviation of a normal distribution, as a multiple of its mean absolute deviation."""
COLUMNS: Final = ("run", "", *(f"{name} {q}" for name in ("TTFT", "TPOT") for q in ("p50", "p90", "p99")))


@dataclass(frozen=True, slots=True)
class Compared:
    """One load on one cluster under one policy: what was real, and what was simulated, by the coefficients' source."""

    case: Case
    load: LoadKind
    policy: str
    real: RealRun
    simulated: Mapping[str, Sequence[Fate]]
    is_fitted_on: bool

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.load.name}" + (f" {self.policy}" if self.policy != USUAL else "")

    @property
    def numbers(self) -> Numbers:
        return self.numbers_of(self.real.fates)

    def numbers_of(self, fates: Sequence[Fate]) -> Numbers:
        return Numbers.of(fates, self.case.ttft_ms, self.case.tpot_ms)

    def deviations(self, source: str) -> dict[str, float]:
        return deviations(self.numbers, self.numbers_of(self.simulated[source]))


@dataclass(slots=True)
class Measured:
    """What a cluster left: what was real, and the twins that are simulated."""

    runs: list[tuple[LoadKind, str, Sequence[TraceRow], RealRun]] = field(default_factory=list)
    twins: list[Twin] = field(default_factory=list)


def measure(
    case: Case, loads: Sequence[LoadKind], policies: Sequence[str], options: Namespace, folder: Path, console: Console
) -> Measured:
    """Start the cluster of a case, replay the loads, the first one with each policy. Raises StackError, TraceError."""
    found = Measured()
    pace, known = folder / "pace.json", case.coefficients()
    pace.write_bytes(msgspec.json.encode(known))
    began = time.monotonic()
    with Cluster(case, policies, pace, options.seed, options.log_dir) as cluster:
        for policy in policies:
            cluster.warm_up(policy)
        cluster.forget_prefixes()
        message_s = cluster.message_s()
        alone = cluster.alone(alone_rows(), USUAL)
        console.print(f"{case.name}: ready and measured at idle after {time.monotonic() - began:.0f} s")
        for load in loads:
            rows = load.rows(case, options.seconds, options.traces, options.seed, options.begin)
            for policy in policies if load is loads[0] else (USUAL,):
                cluster.forget_prefixes()
                real = cluster.replay(rows, policy, id_tokens=load.id_tokens, seed=options.seed)
                found.runs.append((load, policy, rows, real))
                console.print(f"{case.name} {load.name} {policy}: {len(rows)} requests", highlight=False)
                if len(found.runs) == 1:
                    fitted = cluster.fitted("prefill"), cluster.fitted("decode")
    noise = NOISE_OF_ERROR * max(one.error for one in fitted)
    of_file = Twin(case, "file", known.prefill, known.decode, known.kv_bytes, message_s, noise=noise)
    of_fit = replace(of_file, source="fit", prefill=fitted[0], decode=fitted[1])
    found.twins = [of_file.calibrated(alone, folder, steps=True), of_fit.calibrated(alone, folder, steps=False)]
    return found


def compare(case: Case, measured: Measured, options: Namespace, folder: Path) -> Iterator[Compared]:
    """Simulate what was measured."""
    for load, policy, rows, real in measured.runs:
        simulated = {
            twin.source: twin.simulate(rows, folder, policy=policy, seed=options.seed, id_tokens=load.id_tokens)
            for twin in measured.twins
        }
        yield Compared(case, load, policy, real, simulated, load is measured.runs[0][0])


def show(console: Console, title: str, compared: Sequence[Compared]) -> None:
    """Print real and simulated numbers, and their deviations, with a * beyond a mark."""
    rows = []
    for one in compared:
        real = one.numbers
        rows.append((one.name, f"real, load {one.real.load_average[1]:.1f}", *_cells(real)))
        for source, fates in one.simulated.items():
            shares = one.deviations(source)
            beyond = misses(shares)
            shown = (f"{share:+.1%}" + ("*" if name in beyond else "") for name, share in shares.items())
            rows.append(("", source, *_cells(one.numbers_of(fates))))
            rows.append(("", "", *shown, "", ""))
    print_table(console, f"{title} (latencies in ms)", (*COLUMNS, "goodput", "good", "refused"), rows, left=(0, 1))


def _cells(numbers: Numbers) -> tuple[str, ...]:
    values = tuple(f"{value:,.1f}" for name, value in numbers.values.items() if name != "goodput")
    others = numbers.num_requests - numbers.num_ok - numbers.outcomes.get("refused", 0)
    refused = f"{numbers.outcomes.get('refused', 0)}" + (f", {others} failed" if others else "")
    return (*values, f"{numbers.goodput:.2f}", f"{numbers.num_good}/{numbers.num_requests}", refused)


def judge(console: Console, compared: Sequence[Compared]) -> dict[str, Any]:
    """Print and return how many values are within their marks, and whether policies are ranked alike."""
    verdict: dict[str, Any] = {}
    for source in compared[0].simulated:
        held_out = [one for one in compared if source != "fit" or not one.is_fitted_on]
        found = {one.name: misses(one.deviations(source)) for one in held_out}
        num_values = sum(len([n for n in one.deviations(source) if not n.endswith("p90")]) for one in held_out)
        num_within = num_values - sum(map(len, found.values()))
        console.print(f"{source}: {num_within} of {num_values} values within their marks", highlight=False)
        verdict[source] = {"within": num_within, "of": num_values, "misses": found}
    for case in dict.fromkeys(one.case for one in compared):
        of_case = [one for one in compared if one.case == case and one.load == compared[0].load]
        for source in compared[0].simulated if len(of_case) > 1 else ():
            real = {one.policy: one.numbers for one in of_case}
            simulated = {one.policy: one.numbers_of(one.simulated[source]) for one in of_case}
            alike, pairs = pairs_ranked_alike(real, simulated)
            told = f"{case.name}, {source}: {alike} of {pairs} pairs of policies are ranked alike"
            console.print(told, highlight=False)
            verdict.setdefault("policies", {})[f"{case.name} {source}"] = {"alike": alike, "pairs": pairs}
    return verdict


def as_json(compared: Sequence[Compared], twins: Sequence[Twin], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, with each request's values in the order of `Fate`'s fields."""
    return {
        "verdict": verdict,
        "fields": list(Fate.__slots__),
        "twins": [msgspec.to_builtins(twin) for twin in twins],
        "runs": [
            {
                "case": one.case.name,
                "load": one.load.name,
                "policy": one.policy,
                "fitted_on": one.is_fitted_on,
                "load_average": one.real.load_average,
                "late_p99_ms": one.real.late_p99_ms,
                "client_cpu_s": one.real.cpu_s,
                "real": _as_json(one, one.real.fates),
                "simulated": {source: _as_json(one, fates) for source, fates in one.simulated.items()},
                "deviations": {source: one.deviations(source) for source in one.simulated},
            }
            for one in compared
        ],
    }


def _as_json(one: Compared, fates: Sequence[Fate]) -> dict[str, Any]:
    return {"numbers": asdict(one.numbers_of(fates)), "requests": [fate.as_row() for fate in fates]}


def parse(argv: Sequence[str]) -> Namespace:
    parser = script_parser(PROGRAM, __doc__)
    names = {"cases": [case.name for case in CASES], "loads": [load.name for load in LOADS]}
    for flag, known in names.items():
        parser.add_argument(f"--{flag}", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument(
        "--policies",
        nargs="*",
        choices=list(POLICIES),
        default=["random", "least-loaded"],
        metavar="NAME",
        help="compared with the usual one on the first load of the largest cluster: " + ", ".join(POLICIES),
    )
    parser.add_argument("--seconds", type=float, default=24.0, help="for which requests arrive, for each load")
    parser.add_argument("--slower", type=float, default=1.0, help="times as slow steps and loads, for a busy machine")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, prompts and noise")
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="folder with the trace files")
    parser.add_argument("--begin", type=float, default=0.0, help="leave out this share of each trace at its begin")
    parser.add_argument("--log-dir", type=Path, help="keep the processes' logs here")
    options = parser.parse_args(argv)
    if not 0 <= options.begin < 1:
        parser.error(f"argument --begin: {options.begin} is not a share from 0 to less than 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Exit status 0, whether real and simulated agree or not."""
    options, console = parse(argv), open_console()
    loads = [load for name in options.loads for load in LOADS if load.name == name]
    compared: list[Compared] = []
    twins: list[Twin] = []
    began = time.monotonic()
    cases = [replace(case, pace=case.pace * options.slower) for case in CASES if case.name in options.cases]
    choosing = max(cases, key=lambda case: case.prefill)  # most to choose among
    for case in cases:
        policies = list(dict.fromkeys([USUAL, *options.policies])) if case is choosing else [USUAL]
        with tempfile.TemporaryDirectory(prefix="diptych-reality-") as folder:
            measured = measure(case, loads, policies, options, Path(folder), console)
            found = list(compare(case, measured, options, Path(folder)))
        show(console, case.name, found)
        compared += found
        twins += measured.twins
    verdict = judge(console, compared)
    took_s = time.monotonic() - began
    console.print(f"took {took_s:.0f} s", highlight=False)
    content = as_json(compared, twins, verdict)
    write_result(options, PROGRAM, argv, content, **settings_of(options), took_s=took_s)
    return 0


if __name__ == "__main__":
    run(main)
