"""Processes of ranks 1, 2, ... of a worker, which rank 0 starts. All of them exit together.

    rank 0   start ── RankPlan ─>     load a shard                               ─ step ─> ─ step ─>   close
    rank r         <─ RankReport ──   load a shard  <─ RankReport, KV memory ─   run steps until rank 0 is gone

If the number of blocks must be measured, each rank sends one more RankReport after loading, and waits for MEASURE.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.engine.ranks.channel import RANK_END_S, Channel
from common.engine.ranks.liveness import SILENT_S, SUSPECT_SILENCE_S, HeartbeatMonitor
from common.engine.run import LargestSteps, MemoryNeed
from common.errors import ModelError, RankLost
from common.machine import ChildProcess, PrivateFolder
from common.model_files import ModelFiles

if TYPE_CHECKING:
    from common.engine.ranks.steps import Numbers  # imports torch, which a starting rank has not loaded

log = logging.getLogger(__name__)
START_S = 900.0
"""Maximum time, in seconds, for a rank process to start."""
LOAD_S = 1800.0
"""Maximum time, in seconds, for a rank to load its shard."""
SEND_S = 30.0
"""Maximum time, in seconds, that a rank may leave a step's message unread. At most one step precedes it."""
MEASURE = b"measure"
"""Message at which ranks start to measure, once all have loaded: collectives have shorter deadlines than loading."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a rank: what to load. `name` is for its logs, `rendezvous` the file at which all ranks meet.

    If `num_blocks` is 0, all ranks measure how many blocks fit in addition to the `largest` steps. Without `with_head`,
    steps return hidden states: see `load_model`.
    """

    rank: int
    size: int
    name: str
    files: ModelFiles
    dtype: str
    kv_dtype: str
    kv_scales: tuple[tuple[float, float], ...]
    quantization: str
    with_head: bool
    batch_invariant: bool
    device: str
    num_blocks: int
    largest: LargestSteps
    block_size: int
    threads: int
    kernel_check: bool
    max_loras: int
    max_lora_rank: int
    rendezvous: str
    need: MemoryNeed
    log_level: str
    log_json: bool


class RankReport(msgspec.Struct, frozen=True):
    """Report of a rank when it has started, when it is about to measure, and when it is ready.

    After a report with a `problem`, the rank exits.
    """

    problem: str = ""


@dataclass(frozen=True, slots=True)
class OtherRank:
    """A rank, and rank 0's ends of its channels."""

    name: str
    steps: Channel
    adapters: Channel
    heartbeat: HeartbeatMonitor
    child: ChildProcess

    @classmethod
    def start(cls, rank: int) -> OtherRank:
        """Start a process. Raises OSError."""
        (ours, theirs), (our_orders, their_orders) = Channel.pair(), Channel.pair()
        child = ChildProcess(f"rank {rank}")
        with theirs, their_orders:
            given = (theirs.fileno(), their_orders.fileno())
            child.launch([sys.executable, "-P", "-m", "common.engine.ranks", *map(str, given)], pass_fds=given)
        steps, adapters = Channel(ours, child.name), Channel(our_orders, child.name)
        return cls(child.name, steps, adapters, HeartbeatMonitor(steps), child)

    @property
    def channels(self) -> Sequence[Channel]:
        return (self.steps, self.adapters)

    @property
    def failure(self) -> str:
        """Reason why the rank is lost, or ""."""
        if not self.child.alive:
            return f"{self.name} is gone (exit status {self.child.returncode})"
        return f"{self.name} is gone" if any(channel.is_cut() for channel in self.channels) else ""


class RankProcesses:
    """Processes of the other ranks. Call `start`, `wait_started`, `wait_ready`, then steps, then `close`.

    Only one thread at a time may call `send_step`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = PrivateFolder("ranks")
        self._ranks: list[OtherRank] = []
        self._broken: RankLost | None = None

    @property
    def rendezvous_file(self) -> str:
        """File at which the ranks meet, in a folder that only this user can read."""
        return str(self._folder.path / "ranks")

    @property
    def adapter_channels(self) -> Sequence[Channel]:
        """Channels to each rank for adapter orders."""
        return [rank.adapters for rank in self._ranks]

    def start(self, plans: Sequence[RankPlan]) -> None:
        """Start the ranks. Raises OSError or RankLost."""
        for plan in plans:
            self._ranks.append(OtherRank.start(plan.rank))
        for plan, rank in zip(plans, self._ranks, strict=True):
            rank.steps.send(msgspec.json.encode(plan, enc_hook=str), SEND_S)

    def wait_started(self) -> None:
        """Wait until all ranks are about to join the group. Raises RankLost or ModelError."""
        self._wait_for_reports(START_S)

    def measure_together(self) -> None:
        """Wait until all ranks have loaded their shards, then let them measure. Raises RankLost or ModelError."""
        self._wait_for_reports(LOAD_S)
        for rank in self._ranks:
            rank.steps.send(MEASURE, SEND_S)

    def wait_ready(self) -> Sequence[OtherRank]:
        """Wait until all ranks have loaded their shards and share their KV memory. Raises RankLost or ModelError."""
        self._wait_for_reports(LOAD_S)
        return self._ranks

    def delete_rendezvous(self) -> None:
        """Delete the rendezvous file after all ranks have met, so that a crash leaves no file."""
        self._folder.close()

    def send_step(self, message: Numbers) -> None:
        """Send a step to all ranks. Raises RankLost."""
        body = message.tobytes()
        for rank in self._ranks:
            rank.steps.send(body, SEND_S)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context of a step. Any error in it leaves the ranks in different states, so no step can follow."""
        if self._broken is not None:
            raise RankLost("an earlier step failed") from self._broken
        try:
            yield
        except BaseException as error:
            why = str(error) if isinstance(error, RankLost) else f"a step failed on rank 0: {error}"
            self._broken = RankLost(self.with_silent_ranks(why))
            raise self._broken from error

    @property
    def failure(self) -> str:
        """Reason why no further step can run, or "". Thread-safe."""
        gone = [why for rank in self._ranks if (why := rank.failure)]
        if gone:  # a rank may exit because a collective timed out
            return self.with_silent_ranks(gone[-1])
        return str(self._broken) if self._broken is not None else self._silence(SILENT_S)

    def with_silent_ranks(self, why: str) -> str:
        """Return a failure with the ranks that have been silent for a while. Thread-safe."""
        return "; ".join(filter(None, (why, self._silence(SUSPECT_SILENCE_S))))

    def close(self) -> None:
        """Stop all ranks, by force if necessary, and delete their files. A step that waits for a rank fails."""
        ranks, self._ranks = self._ranks, []  # first, so that later failures do not name them
        for rank in ranks:
            for channel in rank.channels:
                channel.close()
        deadline = time.monotonic() + RANK_END_S
        for rank in ranks:
            rank.child.wait(deadline)
        self._folder.close()

    def _silence(self, least_s: float) -> str:
        """Return which ranks have been silent for at least `least_s`, or ""."""
        silent = [(rank.name, silent_s) for rank in self._ranks if (silent_s := rank.heartbeat.silent_s()) >= least_s]
        said = [f"{name} has sent no heartbeat for {silent_s:.0f} s" for name, silent_s in silent]
        return f"{', '.join(said)}: its process is stopped or the host overloaded" if said else ""

    def _wait_for_reports(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for rank in self._ranks:
            body = rank.steps.receive(max(0.001, until - time.monotonic()))
            report = msgspec.json.decode(body, type=RankReport)
            if report.problem:
                raise ModelError(f"{rank.name}: {report.problem}")
