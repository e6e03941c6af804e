"""Report of `diptych tune`: table, limits, JSON and configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from benchmarks.load.report import print_table
from benchmarks.plan.candidate import FLAG_NAMES, base_flags
from benchmarks.plan.spec import PlanSpec
from benchmarks.tune.search import FACTORS, Headroom, Predicted, Setting
from benchmarks.tune.service import Measured, ServiceOptions, sections

MOST_ROWS: Final = 6
COLUMNS: Final = ("workers", "settings", "predicted", "measured", "95 % interval", "TTFT p95", "TPOT p95")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Results. `measured` contains the settings that ran on real workers, `unconfirmed` the reasons why others did not.
    `headrooms`: of the pick, then with one more prefill or decode worker, as far as the time allowed."""

    spec: PlanSpec
    options: ServiceOptions
    ranked: Sequence[Predicted]
    measured: Mapping[Setting, Measured]
    unconfirmed: Mapping[Setting, str]
    pick: Setting
    binding: tuple[str, float]
    headrooms: Sequence[Headroom]
    rate: float

    @property
    def attainment(self) -> float:
        """Share of requests of the pick within the goals: measured, or else predicted."""
        if self.pick in self.measured:
            return self.measured[self.pick].attainment
        return next(one.evidence.attainment for one in self.ranked if one.setting == self.pick)

    @property
    def is_confirmed(self) -> bool:
        return self.pick in self.measured


def chosen(
    base: Setting, ranked: Sequence[Predicted], measured: Mapping[Setting, Measured], *, confirms: bool
) -> Setting:
    """Return the best measured setting, or the base unless another is better by more than chance.

    Without `confirms`, return the setting with the best prediction.
    """
    if not confirms:
        return ranked[0].setting if ranked else base
    best = max(measured, key=lambda one: (measured[one].attainment, one == base))
    if base in measured and measured[best].attainment <= measured[base].interval[1]:
        return base
    return best


def changed_flags(spec: PlanSpec, setting: Setting) -> dict[str, int]:
    """Return the flags of a setting that differ from the base."""
    base, own = base_flags(spec), setting.candidate.flags
    return {name: getattr(own, name) for name in FLAG_NAMES if getattr(own, name) != getattr(base, name)}


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Print the table and the conclusions."""
    predicted = {one.setting: one for one in tuning.ranked}
    shown = list(dict.fromkeys([tuning.pick, *tuning.measured, *(one.setting for one in tuning.ranked)]))[:MOST_ROWS]
    rows = []
    for setting in shown:
        real, guess = tuning.measured.get(setting), predicted.get(setting)
        low, high = real.interval if real else (0.0, 0.0)
        ttft_ms = real.summary.ttft_ms.p95 if real else guess.evidence.ttft_ms.p95 if guess else 0.0
        tpot_ms = real.summary.tpot_ms.p95 if real else guess.evidence.tpot_ms.p95 if guess else 0.0
        rows.append(
            (
                ("> " if setting == tuning.pick else "  ") + setting.candidate.shape,
                setting.changes(tuning.spec),
                f"{guess.evidence.attainment:.1%}" if guess else "",
                f"{real.attainment:.1%}" if real else "",
                f"{low:.1%} to {high:.1%}" if real else "",
                f"{ttft_ms:,.0f} ms",
                f"{tpot_ms:,.1f} ms",
            )
        )
    goals = tuning.spec.goals
    title = f"requests within TTFT {goals.ttft_ms:g} ms and TPOT {goals.tpot_ms:g} ms at {tuning.rate:.3g} requests/s"
    print_table(console, title, COLUMNS, rows, left=(0, 1))
    for line in conclusions(tuning):
        console.print(line, highlight=False, markup=False)


def conclusions(tuning: Tuning) -> list[str]:
    """Return the pick, the resource that binds, and what another worker would add, in sentences."""
    pick, (resource, share) = tuning.pick, tuning.binding
    settings = pick.changes(tuning.spec)
    with_settings = "default settings" if settings == "defaults" else settings
    lines = [f"Pick: {pick.candidate.shape} with {with_settings}."]
    if not tuning.is_confirmed:
        lines.append("The pick is a prediction. Restart the service with it and run the command again to confirm it.")
    elif len(tuning.measured) > 1 and pick == next(iter(tuning.measured)):
        lines.append("The defaults are kept: no other measured setting was better by more than chance.")
    elif len(tuning.measured) == 1 and not tuning.options.url:
        lines.append("The defaults are kept: no other setting was measured.")
    if tuning.attainment < (wanted := tuning.spec.goals.quantile):
        lines.append(f"The goals are missed: {tuning.attainment:.1%} of the requests met both, {wanted:.0%} should.")
    for setting, reason in tuning.unconfirmed.items():
        lines.append(f"Not confirmed: {setting.candidate.shape} with {setting.changes(tuning.spec)} ({reason}).")
    lines.append(f"Binding resource: {resource}, used {share:.0%} by this load.")
    if not tuning.headrooms:
        return [*lines, "Headroom: unknown, no time was left to simulate higher loads. Raise --minutes."]
    own, *others = tuning.headrooms
    lines.append(_within(own, tuning.rate))
    if own.factor == FACTORS[-1]:
        return lines
    for one in others:
        role = "decode" if one.candidate.num_decode > pick.candidate.num_decode else "prefill"
        at = f"{one.factor * tuning.rate:.3g} requests/s"
        if not one.factor:
            lines.append(f"One more {role} worker: the goals would still be missed.")
        elif one.factor <= own.factor:
            lines.append(f"One more {role} worker: no higher load within the goals.")
        else:
            gain = f", {one.factor / own.factor - 1:.0%} more" if own.factor else ""
            lines.append(f"One more {role} worker: the goals would be met up to about {at}{gain}.")
    return lines


def _within(own: Headroom, rate: float) -> str:
    if not own.factor:
        return "Headroom: none, the goals are missed even at a quarter of this load."
    if own.factor == FACTORS[-1]:
        return f"Headroom: the goals are also met at {own.factor:.3g} times this load, the highest that was simulated."
    return f"Headroom: the goals are met up to about {own.factor * rate:.3g} requests/s."


def render_config(tuning: Tuning) -> str:
    """Return the configuration file, for `diptych serve --config`."""
    lines = ["# Written by diptych tune.", *(f"# {line}" for line in conclusions(tuning))]
    if of_model := tuning.options.of_model:
        lines += ["", *(f"{name} = {_toml(value)}" for name, value in of_model.items())]
    candidate = tuning.pick.candidate
    serve = {"prefill": candidate.num_prefill, "decode": candidate.num_decode}
    of_processes = sections(tuning.options, tuning.pick, changed_flags(tuning.spec, tuning.pick))
    for section, values in {"serve": serve, **of_processes}.items():
        if values:
            lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # also a TOML string or number


def as_json(tuning: Tuning, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as JSON values."""
    return {
        "conditions": dict(conditions),
        "rate": tuning.rate,
        "pick": asdict(tuning.pick),
        "unconfirmed": [asdict(setting) | {"reason": reason} for setting, reason in tuning.unconfirmed.items()],
        "binding": {"resource": tuning.binding[0], "share": tuning.binding[1]},
        "headrooms": [asdict(one) for one in tuning.headrooms],
        "predicted": [
            asdict(one.setting) | {"attainment": one.evidence.attainment, "num_runs": len(one.evidence.trials)}
            for one in tuning.ranked
        ],
        "measured": [
            asdict(setting) | {"attainment": one.attainment, "interval": one.interval, "summary": asdict(one.summary)}
            for setting, one in tuning.measured.items()
        ],
    }
