"""What a rank other than 0 does for each message of rank 0: run chunks, record steps, or replay one of them.

Every rank launches the same sums in the same order, because it does what the messages say in turn, on one stream. A
replay does not wait for the device, so it is launched while the step before it runs.
"""

from __future__ import annotations

import numpy as np

from common.engine.ranks.step_message import unpack
from common.engine.run import ModelRunner, RecordedSteps, Spread, StepLaunch, StepSizes, recorder_for
from common.errors import ModelError


class FollowedSteps:
    """Belongs to one thread. `spread` brings the tokens that rank 0 has sampled: this rank has no logits."""

    def __init__(self, runner: ModelRunner, spread: Spread) -> None:
        self._runner, self._spread = runner, spread
        self._recorded: RecordedSteps | None = None

    def run(self, message: bytes) -> None:
        """Raises the errors of a step, or ModelError for one that was never recorded."""
        match unpack(np.frombuffer(message, dtype=np.int32)):
            case StepSizes() as sizes:
                model, kv = self._runner.model, self._runner.kv
                recorder = recorder_for(kv.device)
                self._recorded = RecordedSteps(model, kv, recorder, sizes, spread=self._spread, samples=False)
            case StepLaunch() as launch:
                if self._recorded is None:
                    raise ModelError(f"rank 0 replays a step of {launch.size} rows, and none was recorded")
                self._recorded.launch(launch)
            case chunks:
                self._runner.forward(chunks)
