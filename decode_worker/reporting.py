"""What routers hear of their requests: one `TokenOutput` a step each, and failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from common.wire.messages import Message, PromptLogprobs, RequestFailed, Timeline, TokenDelta, TokenOutput
from common.wire.sampling_params import TokenLogprobs
from decode_worker.sequence import DecodeSequence


class Reports:
    """Gathers a step's deltas by router. `emit(router, message)` queues a message."""

    def __init__(self, identity: tuple[str, int], emit: Callable[[bytes, Message], None]) -> None:
        self._worker_id, self._epoch = identity
        self._emit = emit
        self._deltas: dict[bytes, list[TokenDelta]] = defaultdict(list)

    def add(self, sequence: DecodeSequence, reason: str = "", timeline: Timeline | None = None) -> None:
        """Gather the tokens its router does not have from this worker under this attempt."""
        new = sequence.token_ids[sequence.num_prompt_tokens + sequence.num_reported :]
        made_here = sequence.num_reported - sequence.request.num_output_tokens
        self._deltas[sequence.router].append(
            TokenDelta(
                sequence.request_id,
                sequence.attempt,
                sequence.num_reported,
                tuple(new),
                reason,
                sequence.num_cached,
                tuple(sequence.logprobs[made_here : made_here + len(new)]) if sequence.params.logprobs >= 0 else (),
                timeline,
            )
        )
        sequence.num_reported += len(new)

    def wants_prompt_logprobs(self, sequence: DecodeSequence, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Queue log-probabilities of its prompt's tokens from `start` on: at once, before any token that follows."""
        wants_prompt_logprobs = PromptLogprobs(
            worker_id=self._worker_id,
            epoch=self._epoch,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            start=start,
            logprobs=logprobs,
        )
        self._emit(sequence.router, wants_prompt_logprobs)

    def finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        """Gather its last tokens, and where its time went."""
        queue_s = 0.0 if sequence.granted_at else max(0.0, (sequence.admitted_at or now) - sequence.accepted_at)
        timeline = Timeline(
            queue_s=queue_s,
            prefill_s=sequence.prefill_s,
            grant_wait_s=max(0.0, sequence.granted_at - sequence.opened_at),
            transfer_s=sequence.transfer_s,
            exposed_transfer_s=sequence.exposed_transfer_s,
            decode_s=now - sequence.first_token_at,
            num_preemptions=sequence.num_preemptions,
        )
        self.add(sequence, reason, timeline)

    def flush(self) -> None:
        """Queue what was gathered."""
        for router, deltas in self._deltas.items():
            self._emit(router, TokenOutput(worker_id=self._worker_id, epoch=self._epoch, outputs=tuple(deltas)))
        self._deltas.clear()

    def fail(self, router: bytes, request_id: str, attempt: int, phase: str, message: str, *, retryable: bool) -> None:
        """Queue the end of a request that this worker gives up."""
        failed = RequestFailed(
            worker_id=self._worker_id,
            request_id=request_id,
            attempt=attempt,
            phase=phase,
            message=message[:4000],
            retryable=retryable,
        )
        self._emit(router, failed)
