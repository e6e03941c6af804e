"""The decode worker's engine: KV blocks and requests in, tokens out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from common.errors import WireError
from common.grammar.grammar import unsampled
from common.grammar.grammars import GrammarReady, Grammars
from common.kv.block_hash import BlockHasher
from common.kv.block_pool import BlockCounts
from common.runner.runner import ModelRunner
from common.sampling.logprobs import chunk_logprobs, separate
from common.sampling.sampler import Sampler
from common.transfer.outgoing import TransferAdvanced, TransferEnded
from common.transfer.receiver import TransferCompleted, TransferFailed, TransferOpened
from common.transfer.sender import KVSender
from common.wire.messages import AbortRequest, DecodeRequest, HandOver, Message, ResetPrefixCache
from common.wire.sampling_params import SampledToken
from common.worker.awaited_grammars import AwaitedGrammars
from common.worker.engine import Engine, EngineStatus, RequestReceived, RouterLost
from common.worker.step_times import work_of
from decode_worker.engine_config import DecodeEngineConfig
from decode_worker.grants import IncomingTransfers
from decode_worker.handover import Handovers
from decode_worker.pipeline import Launcher, Pipeline, StepInFlight, by_chunk, model_chunks
from decode_worker.recorder import Recorder
from decode_worker.remote_prefill import RemotePrefills
from decode_worker.reporting import Reports
from decode_worker.rules import DecodeRules, phase_of
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus
from decode_worker.speculation import Speculation
from decode_worker.step import DecodeChunk

FEW_SEQUENCES = 4
"""Steps of fewer stream the weights through one core nearly as fast as through two (docs/performance.md)."""
EXPIRE_INTERVAL_S = 0.05


class DecodeEngine(Engine):
    """Owns the block pool (through its scheduler) and the model; the KV receiver writes only what it was lent."""

    def __init__(
        self,
        send: Callable[[list[tuple[bytes, Message]]], None],
        config: DecodeEngineConfig,
        scheduler: DecodeScheduler,
        runner: ModelRunner,
        sampler: Sampler,
        transfers: IncomingTransfers,
        recorder: Recorder,
        sender: KVSender,
        *,
        launcher: Launcher | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """With a `launcher`, steps that it takes are launched before the tokens of the step before are known.

        Without `grammars`, requests with a grammar are refused.
        """
        super().__init__(send)
        self.scheduler, self._runner, self._sampler, self._transfers = scheduler, runner, sampler, transfers
        self._recorder, self._reports = recorder, Reports(config.identity, self.emit)
        self._handovers = Handovers(sender, scheduler, self._reports, recorder, timeout_s=config.handover_timeout_s)
        longest = min(config.max_model_len, scheduler.pool.num_blocks * scheduler.block_size)
        self._rules = DecodeRules(
            config.eos_token_ids,
            knows_grammars=grammars is not None,
            vocab_size=sampler.vocab_size,
            max_model_len=longest,
        )
        self._remote_prefills = RemotePrefills(
            transfers,
            scheduler,
            self._rules,
            recorder,
            functools.partial(self._fail, retryable=True),
            grant_timeout_s=config.grant_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        self._pipeline = Pipeline(scheduler, launcher)
        self._grammars = AwaitedGrammars(grammars, self.notify, scheduler.constrain, self._fail)
        max_draft_tokens, max_rows = config.max_draft_tokens, scheduler.max_num_seqs
        self._speculation = Speculation(self._rules, max_tokens=max_draft_tokens, max_rows=max_rows)
        self._completed_at = 0.0
        self._max_waiting = config.max_waiting
        self._in_step: Sequence[DecodeChunk] = ()
        self._num_rows = 0
        self._expire_at = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pipeline.in_flight is not None

    @property
    def is_light(self) -> bool:
        return (
            max(self._num_rows, len(self.scheduler.running)) < FEW_SEQUENCES and not self.scheduler.num_waiting_tokens
        )

    @property
    def is_empty(self) -> bool:
        return len(self.scheduler) == 0 and self._pipeline.in_flight is None

    def apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, DecodeRequest() as request):
                self._accept(router, request)
            case RequestReceived(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self.scheduler.find(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case RequestReceived(router, HandOver() as order):
                if (without_kv := self._handovers.take(router, order, time.monotonic())) is not None:
                    self._fail(without_kv, "handover", "its KV has to be computed, here or elsewhere", retryable=True)
            case RequestReceived(_, ResetPrefixCache()):
                self.scheduler.pool.reset_cache()
            case RequestReceived(router, message):
                self._refuse(router, message, f"a decode worker takes no {type(message).__name__}")
            case RouterLost(router):
                for sequence in self.scheduler:
                    if sequence.router == router:
                        self._drop(sequence, "router lost")
            case TransferOpened():
                self._remote_prefills.on_opened(command)
            case TransferCompleted():
                if (sequence := self._remote_prefills.on_completed(command)) is not None:
                    self._on_joined(sequence)
            case TransferAdvanced() | TransferEnded():
                self._handovers.on_event(command, time.monotonic())
            case TransferFailed():
                self._remote_prefills.on_failed(command)
            case GrammarReady(compiled):
                self._grammars.ready(compiled, self.scheduler)
            case _:
                raise TypeError(f"unknown command {command!r}")

    def step(self, now: float) -> None:
        in_flight = self._pipeline.in_flight
        if in_flight is not None and (in_flight.has_drafts or self.scheduler.lacks_blocks):
            self._drain()  # drafts decide positions, and preemption frees blocks that a step in flight may write to
        self._pause_due(now)
        output = self.scheduler.schedule(now, self._handovers.withdraw)
        self._remote_prefills.grant(output.granted, now)
        self._recorder.scheduled(output, now)
        certain = [chunk for chunk in output.chunks if not self._rules.ends_in_flight(chunk.sequence)]
        chunks = self._speculation.extend(certain, self._room)
        self._in_step = chunks
        if chunks:
            work = sum(work_of(chunk.num_rows, chunk.start + chunk.num_rows) for chunk in chunks)
            self._num_rows = sum(chunk.num_rows for chunk in chunks)
            self.planned(self._num_rows, work)
        sampling = chunks if self._pipeline.possible else ()
        rows = [row for chunk in sampling if chunk.sample for row in self._rules.rows(chunk)]
        if prepared := self._pipeline.prepare(chunks, rows):
            before = self._pipeline.launch(chunks, prepared, rows, now)
            if before is not None:
                self._complete_step(before)
        else:
            self._drain()
            self._compute([chunk for chunk in chunks if self._is_active(chunk.sequence)], now)
        self._handovers.stepped()
        self._in_step = ()

    def _compute(self, chunks: Sequence[DecodeChunk], now: float) -> None:
        """Run a step from begin to end, nothing being in flight."""
        if not chunks:
            return
        prepared = model_chunks(chunks)
        logits, prompt_logits = separate(self._runner.forward(prepared), prepared)
        spans = by_chunk(prompt_logits, [chunk.num_spans for chunk in chunks])
        for chunk, (of_prompt, *_) in zip(chunks, spans, strict=True):
            if of_prompt is not None:  # such a chunk has no draft
                self._report_prompt_logprobs(chunk, of_prompt)
        rows_of = [self._rules.rows(chunk) if chunk.sample else [] for chunk in chunks]
        sampled = self._sampler.sample(logits, [row for rows in rows_of for row in rows])
        self._runner.wait()  # a sequence that ends now gives its blocks to others
        done_at = time.monotonic()
        for chunk in chunks:
            self.scheduler.advance(chunk)
        self._process_outputs(chunks, by_chunk(sampled, [len(rows) for rows in rows_of]), done_at, done_at - now)

    def _report_prompt_logprobs(self, chunk: DecodeChunk, logits: Tensor) -> None:
        """Tell log-probabilities of the prompt's tokens that follow the chunk's, by the logits of each of its rows."""
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        prompt = sequence.token_ids[: sequence.num_request_tokens]
        logprobs = chunk_logprobs(logits, prompt, chunk.start, sequence.params.prompt_logprobs)
        sequence.num_logprobs_sent = max(sequence.num_logprobs_sent, end)
        self._reports.wants_prompt_logprobs(sequence, chunk.start + 1, logprobs)

    def _complete_step(self, step: StepInFlight) -> None:
        """Process the tokens of a step that was launched, waiting for it if need be."""
        self._in_step = (*step.chunks, *self._in_step)
        completed = self._pipeline.complete(step)
        done_at = time.monotonic()
        step_s, self._completed_at = done_at - max(step.launched_at, self._completed_at), done_at
        sampled = [[SampledToken(token_id) for token_id in token_ids] for token_ids in completed]
        self._process_outputs(step.chunks, sampled, done_at, step_s)

    def _drain(self) -> None:
        """Complete the step in flight, if there is one."""
        if self._pipeline.in_flight is not None:
            self._complete_step(self._pipeline.in_flight)

    def _process_outputs(
        self, chunks: Sequence[DecodeChunk], sampled: Sequence[Sequence[SampledToken]], now: float, step_s: float
    ) -> None:
        """`sampled` are the tokens of each chunk's rows; none for a sequence that has ended meanwhile."""
        num_tokens = num_accepted = 0
        for chunk, tokens in zip(chunks, sampled, strict=True):
            if tokens:
                accepted = self._speculation.learn(chunk, [token.token_id for token in tokens])
                num_accepted += accepted
                num_tokens += self._on_tokens(chunk.sequence, tokens[: accepted + 1], now)
        self._reports.flush()
        self._speculation.stepped(chunks, step_s)
        self._recorder.stepped(chunks, num_tokens, num_accepted, step_s)

    def _room(self, sequence: DecodeSequence, num_tokens: int) -> int:
        """For how many of `num_tokens` drafts a sequence has room. One that leaves grows within what was announced."""
        return 0 if sequence in self._handovers else self.scheduler.room_for(sequence, num_tokens)

    def _pause_due(self, now: float) -> None:
        """Pause the sequences whose last blocks are to travel, once no step in flight writes to them."""
        if self._handovers.wants_pause:
            self._drain()
            self._handovers.pause_due(now)

    def _is_active(self, sequence: DecodeSequence) -> bool:
        return self.scheduler.find(sequence.request_id) is sequence

    def expire(self, now: float) -> None:
        if self._transfers.failure is not None:
            raise RuntimeError("the KV receiver died") from self._transfers.failure
        if self._handovers.failure is not None:
            raise RuntimeError("the KV sender died") from self._handovers.failure
        if now < self._expire_at:
            return
        self._expire_at = now + EXPIRE_INTERVAL_S
        for sequence in self.scheduler:
            if sequence.deadline < now:
                phase = phase_of(sequence)
                self._fail(sequence, phase, f"the request's time was over in {phase}", retryable=False)
            else:
                self._grammars.expire(sequence, now)
        self._remote_prefills.expire(now)
        self._handovers.expire(now)

    def tell_progress(self, *, has_stepped: bool) -> None:
        for sequence in self.scheduler:
            if sequence.status is RequestStatus.TRANSFERRING or (has_stepped and sequence.awaits_turn):
                self._reports.add(sequence)
        self._reports.flush()

    def fail_step(self, error: Exception) -> None:
        for chunk in self._in_step:
            if self._is_active(chunk.sequence):
                why = f"the step failed: {type(error).__name__}: {error}"
                self._fail(chunk.sequence, "decode", why, retryable=True)
        self._in_step = ()

    def snapshot(self) -> EngineStatus:
        scheduler = self.scheduler
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.queue) + len(scheduler.unready),
            num_transferring=scheduler.num_transferring + scheduler.num_leaving,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            blocks=scheduler.pool.counts,
            tokens_per_s=self._recorder.tokens_per_s,
            step_time_s=self._recorder.step_time_s,
            num_dropped_frames=self._transfers.num_dropped_frames + self._handovers.num_dropped_frames,
        )

    def check_integrity(self) -> BlockCounts:
        return self.scheduler.check_integrity()

    def close(self) -> None:
        try:
            self._pipeline.close()
        finally:  # whatever a step in flight came to: threads left behind would keep the process from ending
            self._transfers.stop()
            self._handovers.stop()
            self._grammars.close()

    def _accept(self, router: bytes, request: DecodeRequest) -> None:
        known = self.scheduler.find(request.request_id)
        if known is not None:
            if known.router != router:
                why = f"request id {request.request_id} is another router's"
                self._tell_failed(router, request.request_id, request.attempt, "queue", why, retryable=False)
                return
            if known.attempt >= request.attempt:
                return  # a duplicate: the first one keeps running
            if known.is_continued_by(request):
                self._accept_attempt(known, request)
                return
            self._drop(known, "superseded by a new attempt")
        try:
            token_ids = self._rules.prompt(request)
        except WireError as error:
            self._refuse(router, request, str(error))
            return
        if len(self.scheduler) >= self._max_waiting + self.scheduler.max_num_seqs:
            self._refuse(router, request, f"{len(self.scheduler)} requests are here already", retryable=True)
            return
        now = time.monotonic()
        status = RequestStatus.EXPECTING if request.prefill_worker else RequestStatus.WAITING
        hasher = BlockHasher(self.scheduler.block_size, request.cache_salt)
        sequence = DecodeSequence(router, request, token_ids, hasher, now, now + request.deadline_s, status)
        self.scheduler.add(sequence)
        self._remote_prefills.expect(sequence)
        self._grammars.ask(sequence)

    def _accept_attempt(self, sequence: DecodeSequence, request: DecodeRequest) -> None:
        """The router found another prefill worker, or none: keep what has arrived, expect the rest from there."""
        self._handovers.cancel(sequence, "superseded by a new attempt")
        if sequence.is_incoming:
            self._remote_prefills.release(sequence, "superseded by a new attempt")
            self.scheduler.expect_again(sequence)
        sequence.restart_reporting(request)
        if not sequence.is_incoming:
            if sequence.has_first_token:
                self._reports.add(sequence)
                self._reports.flush()
        elif not request.prefill_worker:
            self.scheduler.prefill_locally(sequence, sequence.num_received_blocks)
        self._remote_prefills.expect(sequence)

    def _on_joined(self, sequence: DecodeSequence) -> None:
        """Its KV has arrived, and with it one token at least."""
        reason = self._rules.finish_reason(sequence, sequence.token_ids[-1])
        if reason:
            self._finish(sequence, reason, sequence.joined_at)
        elif sequence.request.num_reserved_tokens:
            self._reports.add(sequence)  # its router listens to the worker before until it hears from this one
        self._reports.flush()

    def _on_tokens(self, sequence: DecodeSequence, sampled: Sequence[SampledToken], now: float) -> int:
        """Its next tokens, each but the last drafted before it was sampled: how many it takes before it ends."""
        for place, token in enumerate(sampled):
            if token.token_id >= self._rules.vocab_size:  # its next step would fail the whole batch
                if place:  # the router has the tokens before first, as it would have without draft tokens
                    self._reports.add(sequence)
                    self._reports.flush()
                self._fail(sequence, *unsampled(sequence.constraint, "decode"), retryable=False)
                return place
            if place:
                self.scheduler.accept(sequence)
            elif not sequence.first_token_at:
                sequence.joined_at = sequence.first_token_at = now
                sequence.prefill_s = now - sequence.admitted_at
                self._recorder.prefilled(sequence)
            sequence.append(token)
            if reason := self._rules.finish_reason(sequence, token.token_id):
                self._finish(sequence, reason, now)
                return place + 1
        self._reports.add(sequence)
        return len(sampled)

    def _finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        self._handovers.cancel(sequence, f"it ended: {reason}")
        self._reports.finish(sequence, reason, now)
        self._recorder.finished(sequence, reason, now)
        self.scheduler.remove(sequence)

    def _drop(self, sequence: DecodeSequence, reason: str) -> None:
        """Forget a request without a word to its router."""
        self._handovers.cancel(sequence, reason)
        self._remote_prefills.release(sequence, reason)
        self.scheduler.remove(sequence, sequence.num_received_blocks)

    def _fail(self, sequence: DecodeSequence, phase: str, message: str, *, retryable: bool) -> None:
        self._drop(sequence, message)
        self._tell_failed(sequence.router, sequence.request_id, sequence.attempt, phase, message, retryable=retryable)

    def _refuse(self, router: bytes, message: Message, why: str, *, retryable: bool = False) -> None:
        request_id, attempt = getattr(message, "request_id", ""), getattr(message, "attempt", 0)
        if request_id:
            self._remote_prefills.refuse(request_id, attempt, why)
            self._tell_failed(router, request_id, attempt, "queue", why, retryable=retryable)

    def _tell_failed(
        self, router: bytes, request_id: str, attempt: int, phase: str, why: str, *, retryable: bool
    ) -> None:
        self._reports.fail(router, request_id, attempt, phase, why, retryable=retryable)
        self._recorder.failed(phase)
