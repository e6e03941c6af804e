"""What a decode worker reports of a sequence: each token once, and at the end a timeline."""

from __future__ import annotations

from torch import Tensor

from common.engine.sampling import chunk_logprobs
from common.engine.sequences import Reports
from common.wire.messages import Timeline, TokenDelta
from decode_worker.sequence import DecodeSequence


class DecodeReports(Reports):
    """Gathers what is new of each sequence."""

    def add(self, sequence: DecodeSequence, reason: str = "", timeline: Timeline | None = None) -> None:
        """Gather the tokens that its router has not got from this worker under this attempt."""
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
        """Queue log-probabilities of the prompt's tokens behind `start`; `logits` belong to those from `start` on."""
        prompt = sequence.token_ids[: sequence.num_request_tokens]
        found = chunk_logprobs(logits, prompt, start, sequence.params.prompt_logprobs)
        self.report_prompt_logprobs(sequence, start, found)

    def finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        """Gather its last tokens, and the durations of its phases."""
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
            num_drafts=sequence.tally.num_drafts,
            num_draft_tokens=sequence.tally.num_tokens,
            accepted_places=tuple(sequence.tally.accepted),
        )
        self.add(sequence, reason, timeline)
