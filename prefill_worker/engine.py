"""The prefill worker's engine: prompts in, KV blocks and first tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from common.errors import WireError
from common.grammar.grammar import unsampled
from common.grammar.grammars import GrammarReady, Grammars
from common.kv.block_hash import BlockHasher
from common.kv.block_pool import BlockCounts
from common.model.batch import SequenceChunk
from common.runner.runner import ModelRunner
from common.sampling.finish import banned_tokens, finish_reason
from common.sampling.logprobs import chunk_logprobs, separate
from common.sampling.sampler import Sampler, SamplingRow
from common.transfer.outgoing import TransferEnded
from common.transfer.sender import KVSender
from common.wire.message_fields import unpack_tokens
from common.wire.messages import (
    AbortRequest,
    KVDone,
    Message,
    PrefillRequest,
    PromptLogprobs,
    RequestFailed,
    ResetPrefixCache,
    Timeline,
    TokenDelta,
    TokenOutput,
)
from common.wire.sampling_params import SampledToken
from common.worker.awaited_grammars import AwaitedGrammars
from common.worker.engine import Engine, EngineStatus, RequestReceived, RouterLost
from common.worker.metrics import WorkerMetrics
from common.worker.step_times import work_of
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler
from prefill_worker.sequence import PrefillSequence

RATE_SMOOTHING = 0.2


class PrefillEngine(Engine):
    """Owns the block pool (through its scheduler) and the model; the KV sender only reads blocks."""

    def __init__(
        self,
        send: Callable[[list[tuple[bytes, Message]]], None],
        identity: tuple[str, int],
        scheduler: PrefillScheduler,
        runner: ModelRunner,
        sampler: Sampler,
        sender: KVSender,
        *,
        eos_token_ids: Collection[int],
        max_model_len: int,
        max_waiting: int,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `grammars`, requests with a grammar are refused."""
        super().__init__(send)
        self._grammars = AwaitedGrammars(grammars, self.notify, scheduler.constrain, self._fail)
        self._worker_id, self._epoch = identity
        self.scheduler, self._runner, self._sampler, self._sender = scheduler, runner, sampler, sender
        self._eos = tuple(eos_token_ids)
        self._max_model_len, self._max_waiting = max_model_len, max_waiting
        self._in_step: Sequence[PrefillChunk] = ()
        self._rate = self._step_time = 0.0
        self.metrics: WorkerMetrics | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_empty(self) -> bool:
        return len(self.scheduler) == 0

    def apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, PrefillRequest() as request):
                self._accept(router, request)
            case RequestReceived(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self.scheduler.find(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case RequestReceived(_, ResetPrefixCache()):
                self.scheduler.pool.reset_cache()
            case RequestReceived(router, message):
                self._refuse(router, message)
            case RouterLost(router):
                for sequence in self.scheduler:
                    if sequence.router == router:
                        self._drop(sequence, "router lost")
            case TransferEnded():
                self._on_transfer_ended(command)
            case GrammarReady(compiled):
                self._grammars.ready(compiled, self.scheduler.unready)
            case _:
                raise TypeError(f"unknown command {command!r}")

    def step(self, now: float) -> None:
        output = self.scheduler.schedule(now)
        for sequence in output.admitted:
            self._on_admitted(sequence, now)
        self._in_step = output.chunks
        num_tokens = sum(chunk.num_tokens for chunk in output.chunks)
        self.planned(num_tokens, sum(work_of(c.num_tokens, c.start + c.num_tokens) for c in output.chunks))
        chunks = [_model_chunk(chunk) for chunk in output.chunks]
        logits, prompt_logits = separate(self._runner.forward(chunks), chunks)
        for chunk, rows in zip(output.chunks, prompt_logits, strict=True):
            if rows is not None:
                self._emit_prompt_logprobs(chunk, rows)
        finished = [chunk.sequence for chunk in output.chunks if chunk.sample]
        sampled = self._sampler.sample(logits, [self._row(sequence) for sequence in finished]) if finished else []
        self._runner.wait()  # the sender may read the blocks once it hears of them
        tokens = dict(zip((sequence.request_id for sequence in finished), sampled, strict=True))
        done_at = time.monotonic()
        for chunk in output.chunks:
            self._on_computed(chunk, tokens.get(chunk.sequence.request_id), done_at)
        self._in_step = ()
        self._measure(num_tokens, done_at - now)

    def expire(self, now: float) -> None:
        if self._sender.failure is not None:
            raise RuntimeError("the KV sender died") from self._sender.failure
        for sequence in [s for s in self.scheduler if s.deadline < now]:
            phase = "transfer" if sequence.computed else "prefill" if sequence.blocks else "queue"
            self._fail(sequence, phase, f"the request's time was over in {phase}", retryable=False)
        for sequence in list(self.scheduler.unready):
            self._grammars.expire(sequence, now)

    def tell_progress(self, *, has_stepped: bool) -> None:
        if not has_stepped:
            return  # what is held waits for decode workers, and what waits, for room
        deltas: dict[bytes, list[TokenDelta]] = {}
        for sequence in self.scheduler:
            if not sequence.computed:
                delta = TokenDelta(sequence.request_id, sequence.attempt, sequence.request.num_output_tokens, ())
                deltas.setdefault(sequence.router, []).append(delta)
        for router, outputs in deltas.items():
            self.emit(router, TokenOutput(worker_id=self._worker_id, epoch=self._epoch, outputs=tuple(outputs)))

    def fail_step(self, error: Exception) -> None:
        for sequence in {id(chunk.sequence): chunk.sequence for chunk in self._in_step}.values():
            self._fail(sequence, "prefill", f"the step failed: {type(error).__name__}: {error}", retryable=True)
        self._in_step = ()

    def snapshot(self) -> EngineStatus:
        scheduler = self.scheduler
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.unready) + len(scheduler.waiting),
            num_transferring=len(scheduler.held),
            num_waiting_tokens=scheduler.num_waiting_tokens,
            blocks=scheduler.pool.counts,
            tokens_per_s=self._rate,
            step_time_s=self._step_time,
            num_dropped_frames=self._sender.num_dropped_frames,
        )

    def check_integrity(self) -> BlockCounts:
        return self.scheduler.check_integrity()

    def close(self) -> None:
        self._sender.stop()
        self._grammars.close()

    def _accept(self, router: bytes, request: PrefillRequest) -> None:
        known = self.scheduler.find(request.request_id)
        if known is not None:
            if known.router != router:
                self._refuse(router, request, f"request id {request.request_id} is another router's")
                return
            if known.attempt >= request.attempt:
                return  # a duplicate: the first one keeps running
            self._drop(known, "superseded by a new attempt")
        try:
            token_ids = unpack_tokens(request.prompt)
        except WireError as error:
            self._refuse(router, request, str(error))
            return
        problem = self._problem(request, token_ids)
        if problem:
            self._refuse(router, request, problem)
        elif len(self.scheduler.unready) + len(self.scheduler.waiting) >= self._max_waiting:
            self._refuse(router, request, f"{self._max_waiting} prompts wait already", retryable=True)
        else:
            now = time.monotonic()
            hasher = BlockHasher(self.scheduler.block_size, request.cache_salt)
            sequence = PrefillSequence(router, request, token_ids, hasher, now, now + request.deadline_s)
            self.scheduler.add(sequence)
            self._grammars.ask(sequence)

    def _problem(self, request: PrefillRequest, token_ids: list[int]) -> str:
        capacity = self.scheduler.pool.num_blocks * self.scheduler.block_size
        vocab_size = self._sampler.vocab_size
        if not token_ids:
            return "the prompt is empty"
        if len(token_ids) > min(self._max_model_len, capacity):
            return f"the prompt has {len(token_ids)} tokens, this worker takes {min(self._max_model_len, capacity)}"
        if max(token_ids) >= vocab_size:
            return f"token id {max(token_ids)} is outside of the vocabulary of {vocab_size}"
        if request.num_output_tokens >= len(token_ids):
            return f"{request.num_output_tokens} of the prompt's {len(token_ids)} tokens cannot be output"
        if request.params.grammar and not self._grammars.known:
            return "this worker knows no grammars"
        return ""

    def _on_admitted(self, sequence: PrefillSequence, now: float) -> None:
        request = sequence.request
        if request.decode is not None:
            size = self.scheduler.block_size
            num_ready, num_used = sequence.num_computed // size, sequence.num_tokens % size
            if self._sender.quantises and num_used:
                # What an earlier prompt left there would count for the scale of this one's numbers.
                self._runner.kv.clear_slots(sequence.blocks[-1], num_used)
            self._sender.open(request.request_id, request.attempt, request.decode, sequence.blocks, num_ready)
            sequence.lent = True
        if self.metrics is not None:
            self.metrics.queue_seconds.observe(now - sequence.accepted_at)
            self.metrics.prefix_queries.inc(sequence.num_tokens)
            self.metrics.prefix_hits.inc(sequence.num_cached)

    def _on_computed(self, chunk: PrefillChunk, sampled: SampledToken | None, now: float) -> None:
        sequence = chunk.sequence
        num_ready = self.scheduler.advance(chunk, now)
        if sampled is None:
            if sequence.request.decode is not None:
                self._sender.progress(sequence.request_id, sequence.attempt, num_ready)
            return
        if sampled.token_id >= self._sampler.vocab_size:
            self._fail(sequence, *unsampled(sequence.constraint, "prefill"), retryable=False)
            return
        reason = self._finish_reason(sequence, sampled)
        self.emit(sequence.router, self._first_token(sequence, sampled, reason))
        if sequence.request.decode is not None:
            # Also for a finished request: the decode worker finishes it by the same rule, and has no failure to report.
            prefill_s = sequence.computed_at - sequence.admitted_at
            done = KVDone(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                first_token=sampled.token_id,
                logprobs=sampled.logprobs,
                num_cached_tokens=sequence.num_cached,
                prefill_s=prefill_s,
                computed_at=sequence.computed_at,
            )
            self._sender.progress(sequence.request_id, sequence.attempt, num_ready, done)
        else:
            self._drop(sequence, "finished")
            if self.metrics is not None:
                self.metrics.count_finished(reason or "length")
        if self.metrics is not None:
            self.metrics.prefill_seconds.observe(sequence.computed_at - sequence.admitted_at)
            self.metrics.prompt_tokens.inc(sequence.num_tokens)
            self.metrics.generation_tokens.inc()

    def _on_transfer_ended(self, event: TransferEnded) -> None:
        sequence = self.scheduler.find(event.request_id)
        if sequence is None or sequence.attempt != event.attempt:
            return
        if event.reason:
            self._fail(sequence, "transfer", event.reason, retryable=True)
            return
        if self.metrics is not None:
            self.metrics.grant_wait_seconds.observe(event.grant_wait_s)
            self.metrics.transfer_seconds.observe(event.transfer_s)
            self.metrics.exposed_seconds.observe(event.exposed_s)
            self.metrics.transfer_bytes.inc(event.num_bytes)
            self.metrics.skipped_blocks.inc(event.num_skipped)
            self.metrics.count_transfer(shared=event.shared)
            self.metrics.count_finished("transferred")
        self._drop(sequence, "acknowledged")  # even if it was still computing: the decode worker needs nothing more

    def _emit_prompt_logprobs(self, chunk: PrefillChunk, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow the chunk's, by the logits of each of its rows."""
        sequence = chunk.sequence
        params = sequence.request.params
        message = PromptLogprobs(
            worker_id=self._worker_id,
            epoch=self._epoch,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            start=chunk.start + 1,
            logprobs=chunk_logprobs(logits, sequence.token_ids, chunk.start, params.prompt_logprobs),
        )
        self.emit(sequence.router, message)

    def _first_token(self, sequence: PrefillSequence, sampled: SampledToken, reason: str) -> TokenOutput:
        delta = TokenDelta(
            sequence.request_id,
            sequence.attempt,
            sequence.request.num_output_tokens,
            (sampled.token_id,),
            reason,
            sequence.num_cached,
            (sampled.logprobs,) if sampled.logprobs is not None else (),
            Timeline(
                queue_s=sequence.admitted_at - sequence.accepted_at,
                prefill_s=sequence.computed_at - sequence.admitted_at,
            ),
        )
        return TokenOutput(worker_id=self._worker_id, epoch=self._epoch, outputs=(delta,))

    def _row(self, sequence: PrefillSequence) -> SamplingRow:
        request = sequence.request
        num_prompt = sequence.num_tokens - request.num_output_tokens
        return SamplingRow(
            request.params,
            position=sequence.num_tokens,
            output_token_ids=sequence.token_ids[num_prompt:],
            prompt_token_ids=sequence.token_ids[:num_prompt],
            banned=banned_tokens(request.params, self._eos, request.num_output_tokens),
            constraint=sequence.constraint,
        )

    def _finish_reason(self, sequence: PrefillSequence, sampled: SampledToken) -> str:
        return finish_reason(
            sequence.request.params,
            self._eos,
            num_output_tokens=sequence.request.num_output_tokens + 1,
            token_id=sampled.token_id,
            num_tokens=sequence.num_tokens + 1,
            max_model_len=self._max_model_len,
        )

    def _drop(self, sequence: PrefillSequence, reason: str) -> None:
        """Forget a prompt without a word to its router."""
        if sequence.lent:
            self._sender.cancel(sequence.request_id, sequence.attempt, reason)
            sequence.lent = False
        self.scheduler.remove(sequence)

    def _fail(self, sequence: PrefillSequence, phase: str, message: str, *, retryable: bool) -> None:
        self._drop(sequence, message)
        self._report(sequence.router, sequence.request_id, sequence.attempt, phase, message, retryable=retryable)

    def _refuse(self, router: bytes, message: Message, why: str = "", *, retryable: bool = False) -> None:
        request_id, attempt = getattr(message, "request_id", ""), getattr(message, "attempt", 0)
        if request_id:
            why = why or f"a prefill worker takes no {type(message).__name__}"
            self._report(router, request_id, attempt, "queue", why, retryable=retryable)

    def _report(
        self, router: bytes, request_id: str, attempt: int, phase: str, message: str, *, retryable: bool
    ) -> None:
        self.emit(
            router,
            RequestFailed(
                worker_id=self._worker_id,
                request_id=request_id,
                attempt=attempt,
                phase=phase,
                message=message[:4000],
                retryable=retryable,
            ),
        )
        if self.metrics is not None:
            self.metrics.count_failed(phase)

    def _measure(self, num_tokens: int, step_s: float) -> None:
        self._step_time += RATE_SMOOTHING * (step_s - self._step_time)
        self._rate += RATE_SMOOTHING * (num_tokens / max(step_s, 1e-6) - self._rate)
        if self.metrics is not None:
            self.metrics.steps.inc()
            self.metrics.step_seconds.observe(step_s)


def _model_chunk(chunk: PrefillChunk) -> SequenceChunk:
    sequence = chunk.sequence
    tokens = sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return SequenceChunk(tokens, chunk.start, sequence.blocks, chunk.sample, chunk.all_logits)
