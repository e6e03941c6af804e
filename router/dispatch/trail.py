"""Steps of a request in the dispatcher, recorded for `diptych explain`."""

from __future__ import annotations

from typing import Final

import msgspec

from router.policy import Choice, shortened

MAX_STEPS: Final = 32
"""Steps recorded per request. Only requests that move between many workers have more."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """What happened `at` a time on the monotonic clock, in seconds.

    `kind`: accepted, waits (no worker can take it), held (all suitable workers are busy), placed, token (the first one
    of a worker), failed, replaced (another prefill worker), revoked, restarted, moved (hand-over), stayed (the
    hand-over failed). `detail` names workers and causes. `choice` is set for placed.
    """

    at: float
    kind: str
    detail: str = ""
    choice: Choice | None = None


class Trail(msgspec.Struct):
    """The first `MAX_STEPS` steps of a request, and the number of omitted ones."""

    steps: list[Step] = []
    num_omitted: int = 0

    def add(self, step: Step) -> None:
        """Record a step."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)
        else:
            self.num_omitted += 1

    def shorten(self) -> None:
        """Drop most candidates of large pools, once the request has ended."""
        for number, step in enumerate(self.steps):
            if step.choice is not None and (choice := shortened(step.choice)) is not step.choice:
                self.steps[number] = msgspec.structs.replace(step, choice=choice)
