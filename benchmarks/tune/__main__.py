"""`diptych tune`: the settings that meet latency goals best on a fixed number of workers."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.load.client import ServerError
from benchmarks.load.conditions import conditions
from benchmarks.load.report import check_writable, open_console, write_json
from benchmarks.load.trace import TraceError
from benchmarks.load.workload import LengthRange
from benchmarks.plan.candidate import Candidate, Flags, base_flags, plain
from benchmarks.plan.options import with_prompts
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.spec import PlanSpec, merged, spec_of
from benchmarks.plan.trials import Trials, run_trial
from benchmarks.stack import StackError
from benchmarks.time_limit import time_limit
from benchmarks.tune.options import PROG, build_parser
from benchmarks.tune.report import Tuning, as_json, changed_flags, chosen, print_tuning, render_config
from benchmarks.tune.schedule import Schedule
from benchmarks.tune.search import Headroom, Setting, TuneSearch, refusing_spec
from benchmarks.tune.service import Measured, Service, ServiceOptions, TuneLoad, plan_values
from common.config.sources import exit_refused
from common.errors import ConfigError, ModelError

NOT_MET: Final = 1
INTERRUPTED: Final = 130
NUM_CONFIRMED: Final = 2
MOST_SIMULATED: Final = 300
"""Requests of a simulation with Poisson arrivals."""
SEEDS: Final = 3
VALUES: Final[dict[str, tuple[int, ...]]] = {
    "local_prefill_threshold": (0, 64, 256, 1024),
    "max_num_batched_tokens": (256, 512, 1024, 2048),
    "max_num_seqs": (8, 16, 32, 64, 128),
    "local_prefill_chunk": (64, 128, 256, 512),
}
"""Values of each flag to try, in addition to that of the workers."""


NO_FLAGS: Final = Flags(0, 0, 0, 0)
"""Flags of the first measurement, which leaves all at their defaults."""


def spec_from(measured: Measured, load: TuneLoad, options: ServiceOptions, quantile: float) -> PlanSpec:
    """Return the plan's input for the measured workers, with `VALUES` to try. Raises ConfigError."""
    values: dict[str, Any] = with_prompts(plan_values(measured, load, options, quantile))
    if not load.trace:
        values["duration_s"] = MOST_SIMULATED / load.rate
    base = base_flags(spec_of(values))
    lists = {
        name: list(dict.fromkeys([getattr(base, name), *(one for one in tried if one != getattr(base, name))]))
        for name, tried in VALUES.items()
    }
    return spec_of(merged(values, {"search": {"seeds": SEEDS, **lists}}))


def service_options(options: argparse.Namespace) -> ServiceOptions:
    return ServiceOptions(
        options.model,
        options.ttft,
        options.tpot,
        options.url,
        options.api_key,
        options.dtype,
        options.quantization,
        options.kv_memory_gib,
    )


def load_of(options: argparse.Namespace) -> TuneLoad:
    """Raises ConfigError for lengths or a load that are none."""
    lengths = []
    for name in ("input_len", "output_len"):
        try:
            lengths.append(LengthRange.parse(getattr(options, name)))
        except ValueError as error:
            raise ConfigError(name, getattr(options, name), f"a length such as 128 or 64-512 ({error})") from error
    if options.load and options.rate:
        raise ConfigError("rate", options.rate, "omitted with --load")
    return TuneLoad(options.load, options.speedup, options.rate or 0.0, lengths[0], lengths[1], options.seed)


def first_setting(num_workers: int) -> Setting:
    """Return the division of the workers that is measured first."""
    num_prefill = num_workers // 2
    return Setting(Candidate(num_prefill, num_workers - num_prefill, NO_FLAGS))


def larger(candidate: Candidate) -> list[Candidate]:
    """Return the candidate with one more worker, of each role that it has."""
    more = [replace(candidate, num_decode=candidate.num_decode + 1)]
    if not candidate.is_one_pool:
        more.insert(0, replace(candidate, num_prefill=candidate.num_prefill + 1))
    return more


@dataclass(frozen=True, slots=True)
class Steps:
    """Shows on a progress bar what the run does. `began_at`: monotonic seconds."""

    bar: Progress
    task: TaskID
    began_at: float

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.began_at

    def say(self, part: str, text: str) -> None:
        """Show that `part` of the run does what `text` says."""
        self.bar.update(self.task, completed=self.passed_s, description=f"{part}: {text}")


def tuned(options: argparse.Namespace, console: Console) -> Tuning:
    """Measure, search and confirm within the time limit, with a progress bar. Raises what the parts raise."""
    began_at, schedule = time.monotonic(), Schedule(60.0 * options.minutes, confirms=not options.url)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4, disable=options.no_progress) as bar:
        steps = Steps(bar, bar.add_task("start", total=schedule.limit_s), began_at)
        made = service_options(options)
        service = Service(made, load_of(options), partial(steps.say, "defaults"))
        first = None if options.url else first_setting(options.workers)
        try:
            defaults = service.measure(first, {}, schedule.load_s, began_at + schedule.defaults_end_s, fits=True)
        except TimeoutError as error:
            raise ConfigError("minutes", options.minutes, f"longer, to measure the defaults ({error})") from error
        spec = spec_from(defaults, service.load, made, options.quantile)
        base = Setting(plain(Candidate(*_division(defaults, first), base_flags(spec)), spec))
        limit = _Limit(began_at + schedule.search_end_s)
        simulate = partial(run_trial, progress=limit.check)
        with Trials(spec, simulate=simulate) as trials, Trials(refusing_spec(spec), simulate=simulate) as refusing:
            search = TuneSearch(
                trials,
                refusing,
                Outlook(spec),
                base,
                divides=not options.url,
                is_over=limit.is_over,
                say=partial(steps.say, "simulation"),
            )
            ranked = search.run()
            measured, unconfirmed = {base: defaults}, dict[Setting, str]()
            if schedule.confirms:
                best = [one.setting for one in ranked if one.setting != base][:NUM_CONFIRMED]
                confirmed, unconfirmed = confirm(best, service, spec, schedule, steps)
                measured |= confirmed
            pick = chosen(base, ranked, measured, confirms=schedule.confirms)
            steps.say("simulation", "higher loads")
            limit.end_at = began_at + schedule.headroom_end_s
            headrooms = headrooms_of(pick, search)
            binding = search.binding(pick.candidate)
    return Tuning(
        spec, made, ranked, measured, unconfirmed, pick, binding, headrooms, service.load.rate or defaults.rate
    )


def confirm(
    best: Sequence[Setting], service: Service, spec: PlanSpec, schedule: Schedule, steps: Steps
) -> tuple[dict[Setting, Measured], dict[Setting, str]]:
    """Measure settings on real workers, one after the other. Return the measured ones, and why others were not."""
    measured, unconfirmed = dict[Setting, Measured](), dict[Setting, str]()
    for number, setting in enumerate(best, 1):
        service.advance = partial(steps.say, f"confirmation {number} of {len(best)}")
        num_left, needed_s = len(best) + 1 - number, service.needed_s(schedule.load_s)
        end_at = steps.began_at + schedule.confirmation_end_s(steps.passed_s, num_left, needed_s)
        changed = changed_flags(spec, setting)
        try:
            measured[setting] = service.measure(setting, changed, schedule.load_s, end_at, fits=False)
        except TimeoutError as error:
            unconfirmed[setting] = f"{error}; raise --minutes"
        except (StackError, ServerError, ConfigError) as error:
            unconfirmed[setting] = f"{error}".partition("\n")[0]
    return measured, unconfirmed


def headrooms_of(pick: Setting, search: TuneSearch) -> list[Headroom]:
    """Return the headroom of the pick, then with one more worker of each role, as far as the time allows."""
    found: list[Headroom] = []
    with contextlib.suppress(TimeoutError):
        for one in (pick.candidate, *larger(pick.candidate)):
            found.append(search.headroom(one, refuses=pick.refuses))
    return found


@dataclass(slots=True)
class _Limit:
    """Ends simulations at `end_at` (monotonic seconds)."""

    end_at: float

    def is_over(self) -> bool:
        return time.monotonic() > self.end_at

    def check(self, _num_over: int, _now: float) -> None:
        """Raises TimeoutError once the time has passed."""
        if self.is_over():
            raise TimeoutError("no time left to simulate")


def _division(measured: Measured, first: Setting | None) -> tuple[int, int]:
    """Return the numbers of prefill and decode workers that were measured."""
    if first is not None:
        return first.candidate.num_prefill, first.candidate.num_decode
    return measured.num_workers.get("prefill", 0), max(1, measured.num_workers.get("decode", 0))


def deliver(tuning: Tuning, options: argparse.Namespace, argv: Sequence[str], took_s: float, console: Console) -> None:
    """Print the results and write the requested files."""
    print_tuning(console, tuning)
    options.output.write_text(render_config(tuning), encoding="utf-8")
    console.print(f"wrote {options.output}: diptych serve --config {options.output}", highlight=False)
    if options.json:
        write_json(options.json, as_json(tuning, conditions(PROG, argv, took_s=took_s)))
        console.print(f"wrote {options.json}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when the pick misses the goals, 2 for refused input, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options, console = build_parser().parse_args(argv), open_console()
    began_at = time.monotonic()
    try:
        with time_limit(0.0):  # SIGTERM also stops the workers
            check_writable(output=options.output, json=options.json)
            tuning = tuned(options, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return INTERRUPTED
    except (ConfigError, ModelError, ServerError, StackError, TraceError) as error:
        exit_refused(error, PROG, vars(options))
    deliver(tuning, options, argv, time.monotonic() - began_at, console)
    return 0 if tuning.attainment >= options.quantile else NOT_MET


if __name__ == "__main__":
    raise SystemExit(main())
