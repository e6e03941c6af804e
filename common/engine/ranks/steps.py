"""Steps of tensor parallel workers: messages of rank 0, their execution on other ranks, and the sending runners.

Rank 0 sends each step as one message of int32 numbers right before it computes its part: run chunks, record steps, or
replay a recorded step.

    number of chunks, of tokens │ 5 numbers a chunk: tokens, start, blocks, flags, adapter │ token ids │ block tables
    RECORD │ maximum rows │ maximum blocks of a sequence │ 1 to record adapters
    REPLAY │ rows │ 1 with adapters │ number of seat changes │ their places │ their words, of two numbers each

All ranks launch the same collectives in the same order, because they execute messages sequentially on one stream. A
replay does not wait for the device, so it is launched while the previous step runs.

    RankedRunner         every step kernel by kernel                    chunks ─>
    RankedGraphRunner    rows replayed, one recording on every rank     seat changes, which recording ─>
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models import ForwardBatch, SequenceChunk
from common.engine.ranks.liveness import WaitDeadline
from common.engine.ranks.processes import RankProcesses
from common.engine.run import (
    Broadcast,
    GraphRunner,
    ModelRunner,
    RecordedSteps,
    RunnableModel,
    SeatChanges,
    StepLaunch,
    StepRecorder,
    StepSizes,
    recorder_for,
)
from common.errors import ModelError
from common.model_files import ModelConfig
from kernels import on_device

Numbers = npt.NDArray[np.int32]
HEAD, FIELDS = 2, 5
RECORD, REPLAY, REPLAY_HEAD = -1, -2, 4
SAMPLE, ALL_LOGITS = 1, 2


def pack_step(chunks: Sequence[SequenceChunk], block_size: int) -> Numbers:
    """Return the message of a step."""
    used = [-(-(chunk.start + len(chunk.token_ids)) // block_size) for chunk in chunks]
    tokens = sum(len(chunk.token_ids) for chunk in chunks)
    packed = np.empty(HEAD + FIELDS * len(chunks) + tokens + sum(used), dtype=np.int32)
    packed[:HEAD] = (len(chunks), tokens)
    at = HEAD
    for chunk, blocks in zip(chunks, used, strict=True):
        flags = SAMPLE * chunk.sample | ALL_LOGITS * chunk.all_logits
        packed[at : at + FIELDS] = (len(chunk.token_ids), chunk.start, blocks, flags, chunk.adapter)
        at += FIELDS
    for chunk in chunks:
        packed[at : at + len(chunk.token_ids)] = chunk.token_ids
        at += len(chunk.token_ids)
    for chunk, blocks in zip(chunks, used, strict=True):
        packed[at : at + blocks] = chunk.block_table[:blocks]
        at += blocks
    return packed


def token_ids_of(packed: Numbers) -> Numbers:
    """Return a view of a packed step's token ids, int32 [T]."""
    first = HEAD + FIELDS * int(packed[0])
    return packed[first : first + int(packed[1])]


def pack_sizes(sizes: StepSizes) -> Numbers:
    """Return the order to record steps."""
    return np.array((RECORD, sizes.max_num_seqs, sizes.max_blocks, sizes.adapts), dtype=np.int32)


def pack_launch(launch: StepLaunch) -> Numbers:
    """Return the message of a recorded step. Without changes, it has four numbers."""
    places, words = launch.changes
    head = np.array((REPLAY, launch.size, launch.adapted, len(places)), dtype=np.int32)
    return np.concatenate((head, places.astype(np.int32), words.view(np.int32)))


def unpack(packed: Numbers) -> list[SequenceChunk] | StepSizes | StepLaunch:
    """Return the content of a message."""
    if packed[0] == RECORD:
        max_num_seqs, max_blocks, adapts = packed[1:].tolist()
        return StepSizes(max_num_seqs, max_blocks, bool(adapts))
    if packed[0] == REPLAY:
        size, adapted, count = packed[1:REPLAY_HEAD].tolist()
        places, words = np.split(packed[REPLAY_HEAD:], [count])
        # Copies, because 64-bit words may be unaligned in a message.
        return StepLaunch(size, bool(adapted), SeatChanges(places.astype(np.int64), words.copy().view(np.int64)))
    return unpack_step(packed)


def unpack_step(packed: Numbers) -> list[SequenceChunk]:
    """Return the chunks of a message."""
    count, total = (int(number) for number in packed[:HEAD])
    first = HEAD + FIELDS * count
    table = first + total
    chunks = []
    for tokens, start, blocks, flags, adapter in packed[HEAD:first].reshape(count, FIELDS).tolist():
        chunks.append(
            SequenceChunk(
                packed[first : first + tokens].tolist(),
                start,
                packed[table : table + blocks].tolist(),
                sample=bool(flags & SAMPLE),
                all_logits=bool(flags & ALL_LOGITS),
                adapter=adapter,
            )
        )
        first, table = first + tokens, table + blocks
    return chunks


class StepExecutor:
    """Executes rank 0's steps on another rank. Not thread-safe. `spread` receives the tokens sampled on rank 0."""

    def __init__(self, runner: ModelRunner, spread: Broadcast) -> None:
        self._runner, self._spread = runner, spread
        self._recorded: RecordedSteps | None = None

    def run(self, message: bytes) -> None:
        """Execute a message. Raises the errors of a step, or ModelError for a step that was not recorded."""
        match unpack(np.frombuffer(message, dtype=np.int32)):
            case StepSizes() as sizes:
                model, kv = self._runner.model, self._runner.kv
                recorder = recorder_for(kv.device)
                self._recorded = RecordedSteps(model, kv, recorder, sizes, spread=self._spread, samples=False)
            case StepLaunch() as launch:
                if self._recorded is None:
                    raise ModelError(f"rank 0 replays a step of {launch.size} rows, but none was recorded")
                self._recorded.launch(launch)
            case chunks:
                self._runner.forward(chunks)


@dataclass(frozen=True, slots=True)
class RankedBatch(ForwardBatch):
    """A step and its message. On a CPU, its token ids may change until it runs."""

    message: Numbers = field(default_factory=lambda: np.empty(0, np.int32))

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], config: ModelConfig, kv: KVCache) -> RankedBatch:
        """Build a batch. Raises the errors of `ForwardBatch.build`."""
        with on_device(kv.device), torch.inference_mode():
            batch = cls.build(chunks, config, kv)
            assert isinstance(batch, cls)  # mypy infers the base class
            return replace(batch, message=pack_step(chunks, kv.block_size))

    def send(self, others: RankProcesses) -> None:
        """Send the step to the other ranks. Raises RankLost."""
        if self.token_ids.device.type == "cpu":
            token_ids_of(self.message)[:] = self.token_ids.numpy()
        others.send_step(self.message)


class MultiRankRunner(ModelRunner):
    """Runner of chunks on all ranks. Waits for launched steps have a `_deadline`.

    After an error, no step can follow.
    """

    _others: RankProcesses
    _deadline: WaitDeadline

    def prepare(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        return RankedBatch.of(chunks, self.model.config, self.kv)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Run a step. Raises RankLost for any failure; no step can follow."""
        assert isinstance(batch, RankedBatch)  # created by `prepare`
        with self._others.in_step():
            batch.send(self._others)
            return super().run(batch)

    def wait(self) -> None:
        with self._deadline.wait():
            super().wait()

    def waiting(self) -> AbstractContextManager[object]:
        return self._deadline.wait()


class RankedRunner(MultiRankRunner):
    """Launches every step kernel by kernel."""

    def __init__(self, model: RunnableModel, kv: KVCache, others: RankProcesses, deadline: WaitDeadline) -> None:
        super().__init__(model, kv)
        self._others, self._deadline = others, deadline


class RankedGraphRunner(MultiRankRunner, GraphRunner):
    """`GraphRunner` whose steps, including replayed ones, also run on the other ranks.

    A replay sends only the seat changes. Each recording begins with a broadcast (`spread`) of the tokens that rank 0
    has sampled.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv: KVCache,
        recorder: StepRecorder,
        others: RankProcesses,
        spread: Broadcast,
        deadline: WaitDeadline,
        *,
        max_num_seqs: int,
        max_model_len: int,
        adapts: bool = False,
    ) -> None:
        """Record on all ranks at the same time. Raises RankLost if another rank cannot."""
        self._others, self._spread, self._deadline = others, spread, deadline
        super().__init__(model, kv, recorder, max_num_seqs=max_num_seqs, max_model_len=max_model_len, adapts=adapts)

    def _record(self, recorder: StepRecorder, sizes: StepSizes) -> RecordedSteps:
        self._others.send_step(pack_sizes(sizes))
        return RecordedSteps(self.model, self.kv, recorder, sizes, spread=self._spread)

    def _replay(self, launch: StepLaunch, chunks: Sequence[SequenceChunk]) -> None:
        """Replay a step. Raises RankLost for any failure; no step can follow."""
        with self._others.in_step():
            self._others.send_step(pack_launch(launch))
            super()._replay(launch, chunks)
