"""Counts the events of a decode engine in the worker's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.engine.transfer import IncomingTransfer
from common.engine.worker import WorkerMetrics
from decode_worker.sequence import DecodeSequence
from decode_worker.step import DecodeChunk, SchedulerOutput


class DecodeCounters:
    """Called by the engine's thread at each event of a request's life. Times are engine clock, in seconds."""

    def __init__(self, metrics: WorkerMetrics, *, block_size: int) -> None:
        self._metrics, self._block_size = metrics, block_size

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        for sequence in output.granted:
            self._metrics.grant_wait_seconds.observe(now - sequence.opened_at)
        if output.preempted:
            self._metrics.preemptions.inc(len(output.preempted))

    def stepped(
        self,
        chunks: Sequence[DecodeChunk],
        num_sampled: int,
        num_accepted: Mapping[DecodeSequence, int],
        step_s: float,
    ) -> None:
        """`num_sampled` tokens were new, `num_accepted` of each sequence drafted before."""
        for chunk in chunks:
            if chunk.draft.token_ids and chunk.sequence in num_accepted:
                num_tokens, accepted = len(chunk.draft.token_ids), num_accepted[chunk.sequence]
                self._metrics.drafts.count(1, num_tokens, (1,) * accepted, chunk.draft.source)
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(step_s)
        self._metrics.generation_tokens.inc(num_sampled)

    def transfer_completed(self, sequence: DecodeSequence, transfer: IncomingTransfer) -> None:
        self._metrics.transfer_seconds.observe(sequence.transfer_s)
        self._metrics.exposed_seconds.observe(sequence.exposed_transfer_s)
        self._metrics.transfer_bytes.inc(transfer.num_bytes)
        num_hits = transfer.first_block - sequence.first_block
        self._metrics.skipped_blocks.inc(num_hits)
        self._metrics.count_transfer(transfer.transport)
        self._count_prompt(sequence, num_hits * self._block_size)
        if transfer.num_bytes and not transfer.reads_ahead:
            self._metrics.transfer_rate.observe(transfer.num_bytes / max(transfer.busy_s, 1e-6))

    def prefilled(self, sequence: DecodeSequence) -> None:
        self._metrics.queue_seconds.observe(sequence.admitted_at - sequence.accepted_at)
        self._metrics.prefill_seconds.observe(sequence.prefill_s)
        self._metrics.computed_tokens.inc(sequence.num_request_tokens - sequence.num_cached)
        self._count_prompt(sequence, sequence.num_cached)

    def _count_prompt(self, sequence: DecodeSequence, num_hits: int) -> None:
        self._metrics.prompt_tokens.inc(sequence.num_request_tokens)
        self._metrics.prefix_queries.inc(sequence.num_request_tokens)
        self._metrics.prefix_hits.inc(num_hits)
        self._metrics.count_hits(num_hits - sequence.num_restored)
