"""Search for the settings that meet the goals for the most requests, by simulation. Pure, apart from the trials.

The number of workers is fixed. All divisions between the roles are tried first, then one setting is changed at a time
(coordinate ascent), and the finalists are repeated with other seeds. Differences below `STEP` do not count: the setting
with fewer changes is preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.plan.candidate import Candidate, base_flags, neighbours, plain
from benchmarks.plan.evidence import Evidence
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.spec import PlanSpec
from benchmarks.plan.trials import Question, Trials

STEP: Final = 0.005
"""Difference of attainment that counts."""
FINALISTS: Final = 4
MOST_PASSES: Final = 4
FACTORS: Final = tuple(round(0.25 * 1.19**number, 3) for number in range(17))
"""Multiples of the load that are tried for headroom: 0.25 to 4, 19 % apart."""
RESOURCES: Final[Mapping[str, str]] = {
    "prefill time": "prefill compute",
    "decode time": "decode compute",
    "KV blocks": "KV memory",
    "places": "--max-num-seqs",
    "transfer": "KV transfer",
}
"""Names of resources in reports, by that of `Outlook.used`."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Workers and flags, and whether the router refuses requests that are predicted to miss a goal."""

    candidate: Candidate
    refuses: bool = False

    def changes(self, spec: PlanSpec) -> str:
        """Flags that differ from the base; "defaults" without any."""
        found = self.candidate.flags.changes(base_flags(spec))
        refuse = "--slo-refuse predicted" if self.refuses else ""
        return " ".join(filter(None, (found, refuse))) or "defaults"

    def num_changes(self, spec: PlanSpec) -> int:
        """Number of flags that differ from the base."""
        return self.changes(spec).count("--")


@dataclass(frozen=True, slots=True)
class Predicted:
    """A simulated setting."""

    setting: Setting
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Headroom:
    """Multiple of the load up to which a candidate meets the goals, 0 if it never does."""

    candidate: Candidate
    factor: float


class TuneSearch:
    """Settings of a fixed number of workers. `is_over` returns whether the time for simulations has passed."""

    def __init__(
        self,
        trials: Trials,
        refusing: Trials,
        outlook: Outlook,
        base: Setting,
        *,
        divides: bool = True,
        is_over: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`refusing` simulates the same load with `slo_refuse=predicted`. `divides`: also try other divisions."""
        self.spec, self.base, self.outlook = trials.spec, base, outlook
        self._trials = {False: trials, True: refusing}
        self._divides, self._is_over, self._say = divides, is_over, say
        self._known: dict[Setting, Predicted] = {}

    def run(self) -> list[Predicted]:
        """Return all simulated settings, the best first; none if the first simulation ended with TimeoutError."""
        self._say("workers of each role")
        self._simulate(self._divisions())
        if not self._known:
            return []
        for _ in range(MOST_PASSES):
            here = self.ranked()[0].setting
            self._say(f"settings of {here.candidate.shape}")
            self._simulate([Setting(one, here.refuses) for one in neighbours(here.candidate, self.spec)])
            self._simulate([Setting(here.candidate, not here.refuses)])
            if self.ranked()[0].setting == here:
                break
        self._say("finalists with other seeds")
        for number in range(1, self.spec.search.seeds):
            self._simulate([one.setting for one in self.ranked()[:FINALISTS]], number)
        return self.ranked()

    def ranked(self) -> list[Predicted]:
        """Return all simulated settings, the best first."""
        return sorted(self._known.values(), key=self._rank)

    def headroom(self, candidate: Candidate, *, refuses: bool = False) -> Headroom:
        """Return the largest of `FACTORS` at which one run meets the goals, by bisection.

        Raises TimeoutError from a simulation.
        """
        trials, goals, low, high = self._trials[refuses], self.spec.goals, -1, len(FACTORS)
        while high - low > 1:
            middle = (low + high) // 2
            trials.run([Question(candidate, self.spec.seed, FACTORS[middle], goals)])
            found = trials.evidence(candidate, load_factor=FACTORS[middle], goals=goals)
            low, high = (middle, high) if found.attainment >= goals.quantile else (low, middle)
        return Headroom(candidate, FACTORS[low] if low >= 0 else 0.0)

    def binding(self, candidate: Candidate) -> tuple[str, float]:
        """Return the resource of which the load uses the largest share, and the share."""
        name, share = max(self.outlook.used(candidate).items(), key=lambda item: item[1])
        return RESOURCES[name], share

    def _rank(self, one: Predicted) -> tuple[float, int, float, Setting]:
        attainment = round(one.evidence.attainment / STEP)
        own, base = one.setting.candidate, self.base.candidate
        is_divided = (own.num_prefill, own.num_decode) != (base.num_prefill, base.num_decode)
        num_changes = one.setting.num_changes(self.spec) + is_divided
        return (-attainment, num_changes, one.evidence.ttft_ms.p95, one.setting)

    def _divisions(self) -> Sequence[Setting]:
        found = [self.base]
        if self._divides:
            own = self.base.candidate
            total = own.num_prefill + own.num_decode
            each = (Candidate(num, total - num, own.flags) for num in range(total))
            found += [Setting(plain(one, self.spec), self.base.refuses) for one in each]
        return list(dict.fromkeys(found))

    def _simulate(self, settings: Iterable[Setting], seed_number: int = 0) -> None:
        """Simulate settings with one seed, as long as there is time. The first simulation of all always begins."""
        for setting in settings:
            if self._known and self._is_over():
                return
            trials = self._trials[setting.refuses]
            try:
                trials.run([Question(setting.candidate, self.spec.seed + seed_number, 1.0, self.spec.goals)])
            except TimeoutError:
                return
            self._known[setting] = Predicted(setting, trials.evidence(setting.candidate))


def refusing_spec(spec: PlanSpec) -> PlanSpec:
    """Return the same with a router that refuses requests that are predicted to miss a goal."""
    return msgspec.structs.replace(spec, settings={**spec.settings, "slo_refuse": "predicted"})
