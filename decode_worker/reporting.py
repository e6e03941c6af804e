"""Reports of a decode worker: tokens and timelines to routers, and events to metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from common.engine.sampling import chunk_logprobs
from common.engine.sequences import Reports
from common.engine.transfer import IncomingTransfer
from common.engine.worker import WorkerMetrics
from common.wire.messages import Timeline, TokenDelta
from decode_worker.scheduler import DecodeChunk, SchedulerOutput
from decode_worker.sequence import DecodeSequence


class DecodeCounters:
    """Metrics of requests. Called by the engine thread. Times are engine clock, in seconds."""

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
        """Count a step with `num_sampled` new tokens. `num_accepted` are the accepted draft tokens by sequence."""
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


class DecodeReports(Reports):
    """Collects new tokens of each sequence."""

    def add(self, sequence: DecodeSequence, reason: str = "", timeline: Timeline | None = None) -> None:
        """Add the tokens that the router has not received from this worker in this attempt."""
        new = sequence.token_ids[sequence.num_prompt_tokens + sequence.num_reported :]
        made_here = sequence.num_reported - sequence.request.num_output_tokens
        self.add_delta(
            sequence.router,
            TokenDelta(
                sequence.request_id,
                sequence.attempt,
                sequence.num_reported,
                tuple(new),
                reason,
                sequence.num_cached,
                tuple(sequence.logprobs[made_here : made_here + len(new)]) if sequence.params.logprobs >= 0 else (),
                timeline,
            ),
        )
        sequence.num_reported += len(new)

    def report_prompt_logits(self, sequence: DecodeSequence, start: int, logits: Tensor) -> None:
        """Queue log probabilities of the prompt tokens after `start`, from the `logits` of those from `start` on."""
        prompt = sequence.token_ids[: sequence.num_request_tokens]
        found = chunk_logprobs(logits, prompt, start, sequence.params.prompt_logprobs)
        self.report_prompt_logprobs(sequence, start, found)

    def finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        """Add the last tokens, and the durations of all phases."""
        queue_s = 0.0 if sequence.granted_at else max(0.0, (sequence.admitted_at or now) - sequence.accepted_at)
        timeline = Timeline(
            queue_s=queue_s,
            prefill_s=sequence.prefill_s,
            grant_wait_s=max(0.0, sequence.granted_at - sequence.opened_at),
            transfer_s=sequence.transfer_s,
            exposed_transfer_s=sequence.exposed_transfer_s,
            decode_s=now - sequence.first_token_at,
            num_preemptions=sequence.num_preemptions,
            transfer_bytes=sequence.transfer_bytes,
            num_drafts=sequence.draft_stats.num_drafts,
            num_draft_tokens=sequence.draft_stats.num_tokens,
            accepted_places=tuple(sequence.draft_stats.accepted),
        )
        self.add(sequence, reason, timeline)
