"""The processes of ranks 1, 2, ... of a worker: rank 0 starts them, sends them steps, and dies with them.

rank 0   start ── RankPlan ─>     load a shard                               ─ step ─> ─ step ─>   close
rank r         <─ RankReport ──   load a shard  <─ RankReport, KV memory ─   run steps until rank 0 is gone
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.errors import ModelError, RankLost
from common.machine.child_process import ChildProcess
from common.model_files.files import ModelFiles
from common.ranks.channel import Channel

if TYPE_CHECKING:
    from common.ranks.step_message import Numbers  # which imports torch, as a rank has not at its start

log = logging.getLogger(__name__)
START_S = 900.0
"""How long the process of a rank may take to start."""
LOAD_S = 1800.0
"""How long it may take to load its shard."""
SEND_S = 30.0
"""How long a rank may leave a step's message unread: at most one step before it is queued."""
END_S = 5.0


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank: what it is to load. It computes with `threads`; `name` is for its logs.

    Without `with_head` it ends with hidden states: see `load_model`.
    """

    rank: int
    size: int
    name: str
    files: ModelFiles
    dtype: str
    kv_dtype: str
    quantization: str
    with_head: bool
    batch_invariant: bool
    device: str
    num_blocks: int
    block_size: int
    threads: int
    kernel_check: bool
    max_loras: int
    max_lora_rank: int
    meeting_file: str
    log_level: str
    log_json: bool


class RankReport(msgspec.Struct, frozen=True):
    """What a rank says when it has started, and when it is ready. With a `problem` it ends."""

    problem: str = ""


class RankProcesses:
    """`start`, `wait_started`, `wait_ready`, then steps, then `close`. One thread at a time calls `send_step`.

    `adapter_channels` lead to the same ranks, for a thread that loads adapters.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-ranks-")
        self._children: list[ChildProcess] = []
        self._channels: list[Channel] = []
        self.adapter_channels: list[Channel] = []
        self._broken: BaseException | None = None

    @property
    def meeting_file(self) -> str:
        """Where the ranks find each other. Its folder is this user's alone."""
        return str(Path(self._folder.name) / "ranks")

    def start(self, plans: Sequence[RankPlan]) -> None:
        """Start all of them, which takes a moment each. Raises OSError or RankLost."""
        for plan in plans:
            (ours, theirs), (our_orders, their_orders) = Channel.pair(), Channel.pair()
            child = ChildProcess(f"rank {plan.rank}")
            with theirs, their_orders:
                given = (theirs.fileno(), their_orders.fileno())
                child.launch([sys.executable, "-P", "-m", "common.ranks", *map(str, given)], pass_fds=given)
            self._children.append(child)
            self._channels.append(Channel(ours, child.name))
            self.adapter_channels.append(Channel(our_orders, child.name))
        for plan, channel in zip(plans, self._channels, strict=True):
            channel.send(msgspec.json.encode(plan, enc_hook=str), SEND_S)

    def wait_started(self) -> None:
        """Wait until each rank is about to meet the others. Raises RankLost or ModelError."""
        self._wait_for_reports(START_S)

    def wait_ready(self) -> Sequence[Channel]:
        """Wait until each rank has loaded its shard and lends its KV memory. Raises RankLost or ModelError."""
        self._wait_for_reports(LOAD_S)
        return self._channels

    def forget_meeting(self) -> None:
        """They have met: nothing is left in the file system, however this process ends."""
        self._folder.cleanup()

    def send_step(self, message: Numbers) -> None:
        """Have all of them run a step. Raises RankLost."""
        body = message.tobytes()
        for channel in self._channels:
            channel.send(body, SEND_S)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a step: any error in it leaves the ranks at different places, so it is the end of the worker."""
        if self._broken is not None:
            raise RankLost("an earlier step failed") from self._broken
        try:
            yield
        except BaseException as error:
            self._broken = error
            if isinstance(error, RankLost):
                raise
            raise RankLost(f"a step failed on rank 0: {error}") from error

    @property
    def failure(self) -> str:
        """Why no further step can run, "" while there is no reason. Callable from any thread."""
        for child, channel in zip(self._children, self._channels, strict=True):
            if channel.is_cut() or not child.alive:
                return f"{child.name} is gone (exit status {child.returncode})"
        return str(self._broken) if self._broken is not None else ""

    def close(self) -> None:
        """End them, by force if need be, and leave nothing behind. No step may run."""
        for channel in (*self._channels, *self.adapter_channels):
            channel.close()
        deadline = time.monotonic() + END_S
        for child in self._children:
            child.wait(deadline)
        self._children.clear()
        self._channels.clear()
        self.adapter_channels.clear()
        self._folder.cleanup()

    def _wait_for_reports(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for child, channel in zip(self._children, self._channels, strict=True):
            report = msgspec.json.decode(channel.receive(max(0.001, until - time.monotonic())), type=RankReport)
            if report.problem:
                raise ModelError(f"{child.name}: {report.problem}")
