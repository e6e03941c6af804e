"""Runs decode rows as recorded graphs, one per batch size bucket, and everything else like `ModelRunner`.

Each sequence has a seat on the device, from which steps read their inputs (`seats.py`). The previous step leaves token
and position there, so `launch` does not wait for tokens that are still being sampled, and sends only changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from common.blocks import Window
from common.engine.kv import KVCache
from common.engine.models import SequenceChunk
from common.engine.run.recorded_steps import RecordedSteps, StepLaunch, StepRecorder, StepSizes, bucket_for
from common.engine.run.runner import ModelRunner, RunnableModel, StepProfile
from common.engine.run.seats import FROM_HOST, Seats
from common.errors import InvalidRequest
from kernels import SamplingTensors, on_device


class GraphRunner(ModelRunner):
    """`ModelRunner` that replays steps of one sampled token per sequence, for up to `max_num_seqs` sequences."""

    def __init__(
        self,
        model: RunnableModel,
        kv: KVCache,
        recorder: StepRecorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        adapts: bool = False,
    ) -> None:
        """Record all steps: see `RecordedSteps`. With `adapts`, each is also recorded without adapters."""
        super().__init__(model, kv)
        longest = Window(model.config.window, kv.block_size).longest(kv.num_blocks, max_model_len)
        sizes = StepSizes(max_num_seqs, -(-longest // kv.block_size), adapts)
        self._max_tokens, self._sizes, self._adapts = sizes.max_blocks * kv.block_size, sizes.buckets, adapts
        self._seats = Seats(sizes.layout(kv.block_size), model.config, kv)
        self._steps = self._record(recorder, sizes)
        self.logits, self.sampled = self._steps.logits, self._steps.sampled

    @property
    def max_num_seqs(self) -> int:
        return self._sizes[-1]

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Run chunks like `ModelRunner.forward`. The next step overwrites the logits of a replayed one.

        Rows are also replayed if there are prompts, so their logits do not depend on them.
        """
        if self.replays(chunks):
            return self.launch(chunks, [FROM_HOST] * len(chunks))
        recorded = [self._is_row(chunk) for chunk in chunks]
        rows = [chunk for chunk, is_row in zip(chunks, recorded, strict=True) if is_row]
        if len(rows) == len(chunks) or not self.replays(rows):
            return super().forward(chunks)
        batch = self.prepare([chunk for chunk, is_row in zip(chunks, recorded, strict=True) if not is_row])
        of_rows = self.launch(rows, [FROM_HOST] * len(rows))
        profile, began = self.profile, time.perf_counter()
        with torch.inference_mode():
            logits = _in_order(chunks, recorded, of_rows, self.run(batch))
        seconds = profile.forward_s + time.perf_counter() - began
        self.profile = StepProfile(len(rows) + batch.num_tokens, len(chunks), profile.prepare_s, seconds)
        return logits

    def replays(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether a recorded step can run `chunks`."""
        size = bucket_for(self._sizes, len(chunks))
        if size is None or not all(chunk.sample and len(chunk.token_ids) == 1 for chunk in chunks):
            return False
        lengths = [chunk.start + 1 for chunk in chunks]
        return max(lengths) <= self._max_tokens and self._steps.plan(size).takes(lengths)

    def launch(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> Tensor:
        """Replay a step of `chunks`, for which `replays` must be True: logits float32 [len(chunks), vocab_size].

        Row i continues row `sources[i]` of the previous step and runs the token sampled there. With FROM_HOST, the
        caller has written the token to `sampled`, int64 [max_num_seqs], or `draw` has. The logits are the first rows of
        `self.logits`. Raises the errors of `forward`, before anything runs.
        """
        began = time.perf_counter()
        size = bucket_for(self._sizes, len(chunks))
        if size is None:
            raise InvalidRequest(f"{len(chunks)} sequences exceed the largest recorded step of {self._sizes[-1]}")
        plan = self._steps.plan(size)
        if not plan.takes([chunk.start + 1 for chunk in chunks]):
            raise InvalidRequest(f"{len(chunks)} sequences need more than {plan.num_places} partial results")
        changes = self._seats.take(chunks, sources)
        launch = StepLaunch(size, self._adapts and self._seats.has_adapters, changes)
        prepared = time.perf_counter()
        try:
            self._replay(launch, chunks)
        except BaseException:
            self._seats.forget()
            raise
        done = time.perf_counter()
        self.profile = StepProfile(len(chunks), len(chunks), prepared - began, done - prepared)
        return self.logits[: len(chunks)]

    def draw(self, count: int) -> Tensor:
        """Sample the first `count` rows of the last step with their parameters: int64 [count], a view of `sampled`."""
        return self._steps.draw(count)

    def draws(self, count: int) -> SamplingTensors:
        """Return the sampling parameters of the rows, valid until the next launch."""
        return self._steps.draws(count, searches=self._seats.searches)

    def check_integrity(self) -> None:
        """Wait for the last step. Raises BlockError unless the device's seats match the host's copy (`Seats`)."""
        self._seats.check_integrity(self._steps.seats)

    def _record(self, recorder: StepRecorder, sizes: StepSizes) -> RecordedSteps:
        return RecordedSteps(self.model, self.kv, recorder, sizes)

    def _replay(self, launch: StepLaunch, chunks: Sequence[SequenceChunk]) -> None:
        with on_device(self.kv.device), torch.inference_mode():
            if self._steps.hidden is not None:
                self._steps.hidden.send(chunks, launch.size)
            self._steps.launch(launch)

    def _is_row(self, chunk: SequenceChunk) -> bool:
        """Whether a chunk fits in a recorded step: one sampled token."""
        is_single = chunk.sample and len(chunk.token_ids) == 1
        return is_single and chunk.start < self._max_tokens


def _in_order(chunks: Sequence[SequenceChunk], recorded: Sequence[bool], rows: Tensor, others: Tensor) -> Tensor:
    """Return the logits in the order of `chunks`, from those of recorded `rows` and `others`."""
    pieces: list[Tensor] = []
    taken = {True: 0, False: 0}
    for is_row, group in groupby(zip(recorded, chunks, strict=True), lambda pair: pair[0]):
        count = sum(len(chunk.token_ids) if chunk.all_logits else chunk.sample for _, chunk in group)
        first, taken[is_row] = taken[is_row], taken[is_row] + count
        pieces.append((rows if is_row else others)[first : first + count])
    return torch.cat(pieces)
