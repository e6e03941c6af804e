"""The planner's view of a pool, and the bounds that it keeps. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.latency import StepModel
from common.wire import Role


@dataclass(frozen=True, slots=True)
class Goals:
    """The share `quantile` of requests should get their first token, and each later one, within these seconds.

    0: no such goal.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    quantile: float = 0.95


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and most workers of a pool, and what one costs in units of the budget."""

    least: int = 0
    most: int = 64
    price: float = 1.0

    def clamp(self, num: int) -> int:
        return min(self.most, max(self.least, num))


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One worker of a pool: the model of its steps, and its limits. `window`: the most tokens of a sequence whose KV it
    keeps; 0: all."""

    model: StepModel = StepModel()
    num_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 1
    step_tokens: int = 512
    window: int = 0

    def num_kept(self, num_tokens: float) -> float:
        """Of a sequence's tokens, those whose KV it keeps."""
        return min(num_tokens, self.window) if self.window else num_tokens

    @property
    def is_known(self) -> bool:
        """Whether enough is known to predict."""
        return self.model.is_known and self.num_blocks > 0


@dataclass(frozen=True, slots=True)
class PoolState:
    """The workers of a pool by what they do, and what waits there.

    `num_silent`: they served and are not heard now. `num_starting` are not ready yet; of them `num_unschedulable` have
    no machine to run on and may never have one. `num_draining` leave. `num_held` requests own blocks there,
    `num_waiting` have none yet; `is_full`: some wait, and there is no room for them.
    """

    kind: WorkerKind = WorkerKind()
    num_ready: int = 0
    num_starting: int = 0
    num_unschedulable: int = 0
    num_silent: int = 0
    num_draining: int = 0
    num_held: int = 0
    num_waiting: int = 0
    is_full: bool = False

    @property
    def num_present(self) -> int:
        """Workers that serve, or will: those that leave are gone already."""
        return self.num_ready + self.num_starting + self.num_silent

    @property
    def num_usable(self) -> int:
        """Workers that serve or will serve."""
        return self.num_ready + max(0, self.num_starting - self.num_unschedulable)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Both pools. `threshold`: prompts of at most so many uncached tokens are computed by decode workers.

    `start_s`: how long a worker of a role takes from being asked for to being ready. `num_held` requests find no
    worker of a role at all. `homes`, where all workers may change their role: how many there are by the role that they
    were started with, those that change right now included; empty where roles are pinned.
    """

    pools: Mapping[Role, PoolState]
    threshold: int = 64
    start_s: Mapping[Role, float] = field(default_factory=dict)
    num_held: Mapping[Role, int] = field(default_factory=dict)
    homes: Mapping[Role, int] = field(default_factory=dict)

    @property
    def has_prefill(self) -> bool:
        return "prefill" in self.pools
