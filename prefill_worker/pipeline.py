"""Prompt steps in flight: on a GPU, step N+1 is launched shortly before step N ends.

    device   step N                    │ step N+1                        │ ...
    engine   commands ...  launch N+1  │ outputs of N, commands ...  launch N+2  │ ...

Step N+1 does not depend on what step N samples. It is launched late, so that prompts that arrive during step N are
included. On a CPU, each step ends in the iteration that launched it: the host's work takes a hundredth of such a step,
whose kernels use all cores, and fixing steps ahead would delay later prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.engine.sampling import SamplingRow
from common.errors import RankLost
from common.latency import StepModel, StepShape
from prefill_worker.launcher import ChunkOutput, LaunchedPrompts, PromptLauncher
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler

LEAD_S = 0.02
"""Time before the predicted end of a step at which the next is launched, in seconds. Launching takes milliseconds."""
LEAD_SHARE = 0.1
"""Minimum lead as a share of the step, because predictions are inexact."""
LOOK_S = 0.005
"""Interval at which the engine checks whether a step has ended earlier than predicted, in seconds."""


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A launched step. Times are engine clock, in seconds."""

    chunks: Sequence[PrefillChunk]
    shape: StepShape
    launched: LaunchedPrompts
    launched_at: float


class PromptPipeline:
    """Pipeline of steps. Between iterations of the engine, at most one step is in flight; during a launch, two."""

    def __init__(self, scheduler: PrefillScheduler, launcher: PromptLauncher) -> None:
        self._scheduler, self._launcher = scheduler, launcher
        self._ended_at = 0.0
        self.in_flight: PromptStep | None = None

    @property
    def runs_ahead(self) -> bool:
        """Whether steps may stay in flight until the next one is launched."""
        return self._launcher.runs_ahead

    def launch(self, chunks: Sequence[PrefillChunk], shape: StepShape, rows: Sequence[SamplingRow], now: float) -> None:
        """Start a step after the one in flight.

        Raises the errors of `PromptLauncher.launch` after all launched steps have ended, so that nothing of this step
        is left on the device. Raises RankLost at once, without waiting for them.
        """
        try:
            launched = self._launcher.launch(chunks, rows)
        except RankLost:
            raise  # no step can follow, and this one would never end
        except BaseException:
            self._launcher.close()
            raise
        for chunk in chunks:
            self._scheduler.launched(chunk)
        self.in_flight = PromptStep(tuple(chunks), shape, launched, now)

    def complete(
        self, step: PromptStep, clock: Callable[[], float]
    ) -> tuple[list[tuple[PrefillChunk, ChunkOutput]], float, float]:
        """Wait for a step. Return the outputs of chunks whose prompts still exist, its end time, and its duration.

        Raises the device's error. Nothing of the step counts as computed then.
        """
        if self.in_flight is step:
            self.in_flight = None
        began_at = self._began_at(step)
        try:
            outputs = step.launched.read()
        finally:
            self._ended_at = clock()
            are_here = [self._scheduler.ended(chunk) for chunk in step.chunks]
        made = zip(step.chunks, outputs, are_here, strict=True)
        computed = [(chunk, output) for chunk, output, is_here in made if is_here]
        return computed, self._ended_at, self._ended_at - began_at

    def hold_s(self, now: float, model: StepModel) -> float:
        """Return how long the next step should wait for more prompts while the one in flight runs."""
        step = self.in_flight
        if step is None or not model.knows_prompts or step.launched.is_done:
            return 0.0
        step_s = model.seconds(step.shape)
        left_s = self._began_at(step) + step_s - now
        return min(LOOK_S, left_s - max(LEAD_S, LEAD_SHARE * step_s))

    def elapsed_s(self, now: float, model: StepModel) -> float:
        """Return the elapsed part of the predicted time of the step in flight."""
        step = self.in_flight
        return 0.0 if step is None else min(now - self._began_at(step), model.seconds(step.shape))

    def close(self) -> None:
        """Wait for the steps in flight and drop their outputs. Afterwards no step writes to a block."""
        self._launcher.close()

    def _began_at(self, step: PromptStep) -> float:
        return max(step.launched_at, self._ended_at)
