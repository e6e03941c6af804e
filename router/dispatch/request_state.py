"""State of one request from admission to its last token: workers, tokens, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from msgspec.structs import replace

from common.blocks import BlockHasher
from common.errors import RequestError
from common.wire import Role, pack_tokens
from common.wire.messages import PooledOutput, PromptResult, Timeline, TokenDelta
from router.dispatch.client import DraftCounts, GenerationRequest, Prediction, RequestTimeline, TokenEvent
from router.dispatch.prompt import Prompt, PromptHashCache
from router.dispatch.stream import TokenStream
from router.dispatch.trail import MAX_STEPS, Step
from router.fleet import Booking
from router.policy import Choice, Forecast


def added(past: Timeline, spent: Timeline) -> Timeline:
    """Add up the counters and decode time of two decode workers of a request."""
    places = zip_longest(past.accepted_places, spent.accepted_places, fillvalue=0)
    return Timeline(
        decode_s=past.decode_s + spent.decode_s,
        num_preemptions=past.num_preemptions + spent.num_preemptions,
        num_drafts=past.num_drafts + spent.num_drafts,
        num_draft_tokens=past.num_draft_tokens + spent.num_draft_tokens,
        accepted_places=tuple(map(sum, places)),
    )


def waited_s(report: Timeline, sent_at: float, answered_at: float) -> float:
    """Return the seconds that a prompt waited for its worker's first step.

    The prompt was sent at `sent_at`, its first token arrived at `answered_at`. The worker's own report excludes the
    wait for the step in flight, because messages are read between steps.
    """
    if not sent_at or not report.prefill_s:
        return report.queue_s
    return max(report.queue_s, answered_at - sent_at - report.prefill_s)


def drafts_of(timeline: Timeline) -> DraftCounts:
    return DraftCounts(timeline.num_drafts, timeline.num_draft_tokens, timeline.accepted_places)


MIN_PROGRESS = 4
"""Output tokens that count as progress after a move. A prefill worker produces one each time."""
LATE_S = 0.001
"""Remaining time sent to a worker if a first token is already late. 0 would mean that there is no goal."""
NO_TIMELINE = Timeline()


class Stage(StrEnum):
    """queue ─> prefill ─> (transfer) ─> decode ─> done. Deadline errors name the stage."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True)
class Assignment:
    """One worker's part in a request, for the attempts `first_attempt` to `attempt`.

    A decode worker keeps its assignment if only the prefill worker changes, so it may cover several attempts. Its
    prompt ended with the first `num_base_tokens` output tokens. `weights` is the hash of its weights, `weight_version`
    their name. `delivered`: it has sent tokens.
    """

    role: Role
    address: str
    worker_id: str
    epoch: int
    first_attempt: int
    booking: Booking
    attempt: int
    num_base_tokens: int
    weights: str = ""
    weight_version: str = ""
    delivered: bool = False
    sent_at: float = 0.0
    delivered_at: float = 0.0
    timeline: Timeline = NO_TIMELINE

    @property
    def name(self) -> str:
        """Worker name for logs and errors."""
        return f"{self.role} worker {self.worker_id}"


class Attempts:
    """The workers of a request by attempt, and earlier failures.

    Messages with an attempt older than `number` are dropped. `prefill` and `decode` are the current assignments,
    `successor` is the target of a hand-over. The prompts of the current attempt end with the first `num_base_tokens`
    output tokens. `failed_incarnations` contains (address, epoch) of workers that failed the request.
    """

    def __init__(self, stream: TokenStream, now: float) -> None:
        self.number = 0
        self.prefill: Assignment | None = None
        self.decode: Assignment | None = None
        self.successor: Assignment | None = None
        self.num_base_tokens = 0
        self.handover_until = self.handover_after = now
        self.num_failures = self.num_fruitless = self.num_taken_back = 0
        self.failed_incarnations: set[tuple[str, int]] = set()
        self.last_failure = ""
        self._stream = stream
        self._deaths: dict[tuple[str, int], str] = {}
        self._num_tokens_at_move = 0

    @property
    def all(self) -> tuple[Assignment, ...]:
        """Current assignments, the hand-over target first."""
        return tuple(one for one in (self.successor, self.prefill, self.decode) if one is not None)

    @property
    def got_further(self) -> bool:
        """Whether the output has grown since the last failure by more than a few prefills produce."""
        return len(self._stream.token_ids) - self._num_tokens_at_move >= MIN_PROGRESS

    @property
    def num_deaths(self) -> int:
        """Number of workers that died with the request since it last made progress."""
        return len(self._deaths)

    @property
    def dead_workers(self) -> Sequence[str]:
        """Ids of these workers, in the order of their deaths. A worker that restarted may occur several times."""
        return tuple(self._deaths.values())

    @property
    def may_differ(self) -> bool:
        """Whether healthy workers may disagree on tokens, because a second prefill worker recomputed some of them."""
        return self.decode is not None and self.number > self.decode.first_attempt

    def of(self, address: str, attempt: int) -> Assignment | None:
        """Return the current assignment of the worker at `address`, if it covers this attempt."""
        for one in (self.successor, self.prefill, self.decode):  # called for each token
            if one is not None and one.address == address and one.first_attempt <= attempt <= one.attempt:
                return one
        return None

    def may_give_up_handover(self, address: str, attempt: int) -> bool:
        """Return whether the worker is source or target of a hand-over under this attempt."""
        successor, decode = self.successor, self.decode
        if successor is None or decode is None or attempt != successor.attempt:
            return False
        return address in (successor.address, decode.address)

    def is_through_with(self, assignment: Assignment) -> bool:
        """Return whether a prefill worker is no longer needed: the decode worker sends tokens or took over a stream."""
        decode = self.decode
        if decode is None or assignment is not self.prefill:
            return False
        return decode.delivered or decode.first_attempt > assignment.attempt

    def begin(self) -> None:
        """Start a new attempt. Earlier messages are dropped, except from assignments that are extended to it."""
        self.number += 1

    def add(self, assignment: Assignment) -> None:
        """Record that an order was sent to a worker."""
        if assignment.role == "prefill":
            self.prefill = assignment
        else:
            self.decode = assignment

    def remove(self, assignment: Assignment) -> None:
        """Record that a worker's part has ended."""
        if assignment is self.prefill:
            self.prefill = None
        elif assignment is self.decode:
            self.decode = None

    def record_failure(self, failed: Assignment, reason: str, *, died: bool) -> None:
        """Record a failed or dead worker. Fruitless unless the request made progress before."""
        self.num_failures += 1
        if self.got_further:
            self.num_fruitless = 0
            self._deaths.clear()
        else:
            self.num_fruitless += 1
            if died:
                self._deaths[failed.address, failed.epoch] = failed.worker_id
        self._num_tokens_at_move = len(self._stream.token_ids)
        self.last_failure = reason
        self.failed_incarnations.add((failed.address, failed.epoch))

    def forgive_death(self, address: str, epoch: int) -> None:
        """Clear the death of a worker that was only silent and returned with the same epoch."""
        self._deaths.pop((address, epoch), None)


@dataclass(slots=True)
class Times:
    """Timestamps and deadlines of a request, on the monotonic clock.

    `ttft_s` is the goal for the first token, 0 for none. `expected_s` is the predicted time from placement to first
    token, 0 if unknown. The request is not placed before `not_before`. `ask_at` is the time of the next check for
    silence.
    """

    accepted_at: float
    deadline: float
    ttft_s: float
    queued_at: float
    progress_at: float
    renewed_at: float
    ask_at: float
    not_before: float
    expected_s: float = 0.0

    def remaining_s(self, now: float) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self.deadline - now)

    def first_token_s(self, now: float) -> float:
        """Return the seconds until the first token is due: `LATE_S` once it is late, 0 without a goal."""
        return max(LATE_S, self.accepted_at + self.ttft_s - now) if self.ttft_s > 0 else 0.0


class Reports:
    """Merges the timelines reported by the workers of a request. Decode times are summed."""

    def __init__(self) -> None:
        self.queue_s = 0.0
        self.names = {"prefill": "", "decode": ""}
        self._past = NO_TIMELINE
        self._timeline = RequestTimeline()  # built from `_parts`
        self._parts: tuple[object, ...] = ()

    def end(self, assignment: Assignment) -> None:
        """Record that a worker's part has ended. Its decode time still counts."""
        self._past = added(self._past, assignment.timeline)
        self.names[assignment.role] = ""

    def timeline(self, attempts: Attempts, forecast: Forecast, admitted: Prediction) -> RequestTimeline:
        """Return the router's queueing time merged with the reports of the last workers."""
        prefill = attempts.prefill.timeline if attempts.prefill else NO_TIMELINE
        decode = attempts.decode.timeline if attempts.decode else NO_TIMELINE
        names, first, by = (
            self.names,
            prefill if attempts.prefill else decode,
            attempts.prefill or attempts.decode,
        )
        # Most tokens leave it unchanged.
        parts = (
            *(prefill, decode, first, names["prefill"], names["decode"]),
            *(attempts.num_failures, self._past, self.queue_s, forecast),
        )
        if parts == self._parts:
            return self._timeline
        self._parts = parts
        self._timeline = RequestTimeline(
            prefill_worker=names["prefill"],
            decode_worker=names["decode"],
            num_attempts=attempts.num_failures + 1,
            num_preemptions=self._past.num_preemptions + prefill.num_preemptions + decode.num_preemptions,
            queue_s=self.queue_s + (waited_s(first, by.sent_at, by.delivered_at) if by else 0.0),
            prefill_s=first.prefill_s,
            grant_wait_s=max(prefill.grant_wait_s, decode.grant_wait_s),
            transfer_s=max(prefill.transfer_s, decode.transfer_s),
            exposed_transfer_s=max(prefill.exposed_transfer_s, decode.exposed_transfer_s),
            decode_s=self._past.decode_s + decode.decode_s,
            forecast=forecast,
            admitted=admitted,
            transfer_bytes=decode.transfer_bytes,
            drafts=drafts_of(added(self._past, decode)),
        )
        return self._timeline


class RequestState:
    """State of one request: `request` as submitted, its workers (`attempts`), its tokens (`stream`) and its `times`.

    The core changes it and wakes the consumer, which takes the next event. `weights` is the hash of the weights with
    which the answer began, None before its first token. `forecast` belongs to the latest placement, `admitted` to the
    admission. `held_s` is the computation time of the prompt while it is held by the router, else None. `on_move` is
    called when a worker is assigned or unassigned.
    """

    def __init__(self, request: GenerationRequest, now: float, known: PromptHashCache | None = None) -> None:
        """`known`: cache of prompt hashes.

        Raises OverflowError or TypeError for prompt tokens that are not 32-bit token ids.
        """
        self.request = request
        self._prompt = request.prompt or Prompt(request.prompt_token_ids, request.cache_salt, request.adapter)
        self._packed, self._known = self._prompt.packed, known or PromptHashCache()
        self._hashers: dict[int, BlockHasher] = {}
        self.num_prompt_tokens = len(request.prompt_token_ids)
        params = request.params
        self.stream = TokenStream(
            params.max_tokens,
            with_logprobs=params.logprobs >= 0,
            num_prompt_logprobs=len(request.prompt_token_ids) - 1 if params.prompt_logprobs >= 0 else 0,
            pooled_width=request.pooled_width,
        )
        self.attempts = Attempts(self.stream, now)
        self.times = Times(now, now + request.deadline_s, request.ttft_s, now, now, now, now, now)
        self.weights: str | None = None
        self.weight_version = ""
        self.forecast, self.admitted = Forecast(), Prediction()
        self.held_s: float | None = None
        self.num_cached_tokens = 0
        self.done = False
        self.on_move: Callable[[RequestState], None] = _nothing
        self._error: RequestError | None = None
        self._reports = Reports()

    # ------------------------------------------------------------ queries

    @property
    def stage(self) -> Stage:
        if self.done:
            return Stage.DONE
        attempts = self.attempts
        if attempts.prefill is None and attempts.decode is None:
            return Stage.QUEUE
        if len(self.stream.token_ids) <= attempts.num_base_tokens:
            return Stage.PREFILL
        if attempts.decode is not None and not attempts.decode.delivered:
            return Stage.TRANSFER
        return Stage.DECODE

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the output so far."""
        return self.num_prompt_tokens + len(self.stream.token_ids)

    @property
    def num_remaining(self) -> int:
        """Number of output tokens still allowed."""
        return self.request.params.max_tokens - len(self.stream.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether a worker must compute logprobs of the whole prompt."""
        return self.request.params.prompt_logprobs >= 0 and not self.attempts.num_base_tokens

    @property
    def pools(self) -> bool:
        """Whether the answer is a pooled vector, computed by a prefill worker without a decode worker."""
        return bool(self.request.params.pooling)

    @property
    def computes_all(self) -> bool:
        """Whether the whole prompt must be computed: prefix caches store neither logits nor hidden states."""
        return self.wants_prompt_logprobs or self.request.params.pooling == "mean"

    def packed_prompt(self, num_output_tokens: int) -> bytes:
        """Return the prompt of an attempt: the request's prompt and the first tokens of its output."""
        more = self.stream.token_ids[:num_output_tokens]
        return self._packed + pack_tokens(more) if more else self._packed

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the chained block hashes of the prompt and the output so far. Each is computed once."""
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = self._prompt.hasher(block_size, self._known)
        num_output_tokens = len(self.stream.token_ids)
        if (self.num_prompt_tokens + num_output_tokens) // block_size == len(hasher.hashes):
            return hasher.hashes
        return self._prompt.extend(hasher, self.stream.token_ids)

    def needs(self, address: str) -> bool:
        """Return whether the request still needs the worker at `address`.

        A prefill worker is needed until the decode worker sends tokens.
        """
        attempts = self.attempts
        needed = attempts.all if self.stage is not Stage.DECODE else (attempts.decode, attempts.successor)
        return any(one is not None and one.address == address for one in needed)

    @property
    def waits_for(self) -> Assignment | None:
        """Assignment of the worker that must send the next token, or the KV for it if a prefill worker was replaced."""
        attempts = self.attempts
        prefill = attempts.prefill
        if prefill is None or prefill.delivered or attempts.is_through_with(prefill):
            return attempts.decode
        return prefill

    @property
    def decoded_on(self) -> Assignment | None:
        """Assignment of the worker that decodes the request, None in other stages. Faster than checking `stage`."""
        attempts = self.attempts
        decode = attempts.decode
        if decode is None or not decode.delivered or self.done:
            return None
        return decode if len(self.stream.token_ids) > attempts.num_base_tokens else None

    @property
    def records_details(self) -> bool:
        """Whether `note` records the detail of the next step."""
        return self.request.trail is not None and len(self.request.trail.steps) < MAX_STEPS

    # ------------------------------------------------------------ changes

    def note(self, now: float, kind: str, detail: str = "", choice: Choice | None = None) -> None:
        """Record a step for `diptych explain`; see `Step`."""
        if (trail := self.request.trail) is not None:
            trail.add(Step(now, kind, detail, choice))

    def assign(self, assignment: Assignment, now: float) -> None:
        """Record that an order was sent to a worker."""
        if self.attempts.prefill is None and self.attempts.decode is None:
            self._reports.queue_s += now - self.times.queued_at
        self.attempts.add(assignment)
        self._reports.names[assignment.role] = assignment.worker_id
        self.times.progress_at = assignment.sent_at = now
        self.on_move(self)

    def unassign(self, assignment: Assignment) -> None:
        """End a worker's part."""
        self._reports.end(assignment)
        self.attempts.remove(assignment)
        self.on_move(self)

    def record_failure(self, failed: Assignment, reason: str, now: float, *, died: bool) -> None:
        """Record a failed or dead worker."""
        self.attempts.record_failure(failed, reason, died=died)
        self.note(now, "failed", reason)
        self.times.progress_at = now
        self.stream.drop_ahead()

    def succeed(self, now: float) -> tuple[Assignment, Assignment]:
        """Replace the decode worker by the hand-over target. Returns the old and the new assignment."""
        attempts = self.attempts
        before, successor = attempts.decode, attempts.successor
        if before is None or successor is None:
            raise RuntimeError(f"request {self.request.request_id} is not being handed over")
        before.timeline = replace(before.timeline, decode_s=now - before.delivered_at)
        self.unassign(before)
        self.stream.drop_ahead()
        attempts.decode, attempts.successor = successor, None
        self._reports.names["decode"] = successor.worker_id
        attempts.num_base_tokens = successor.num_base_tokens
        self.times.progress_at = now
        return before, successor

    def renew(self, assignment: Assignment, now: float) -> None:
        """Record progress that a worker reported without a token."""
        if assignment is self.waits_for:
            self.times.renewed_at = now

    def receive(self, assignment: Assignment, delta: TokenDelta, now: float) -> bool:
        """Merge tokens from a worker. Return True if the stream grew or ended. Raises StreamConflict."""
        if delta.timeline is not None:
            assignment.timeline = delta.timeline
        try:
            grew = self.stream.add(delta)
        finally:
            if self.weights is None and self.stream.token_ids:
                self.weights, self.weight_version = assignment.weights, assignment.weight_version
        if not assignment.delivered:
            assignment.delivered, assignment.delivered_at = True, now
        self.times.progress_at = now
        if self.attempts.num_base_tokens == 0:
            cached = min(delta.num_cached_tokens, len(self.request.prompt_token_ids))
            self.num_cached_tokens = max(self.num_cached_tokens, cached)
        return grew

    def receive_prompt_result(self, result: PromptResult, now: float) -> None:
        """Process prompt logprobs or a pooled vector from a worker. Raises StreamConflict."""
        if isinstance(result, PooledOutput):
            self.stream.add_pooled(result.values)
        else:
            self.stream.add_prompt_logprobs(result.start, result.logprobs)
        self.times.progress_at = now

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, which is raised after the tokens received before."""
        self._error, self.done = error, True

    def abort(self) -> None:
        """End the stream after the tokens received before."""
        self.stream.finish_reason, self.done = "abort", True

    def take_event(self) -> TokenEvent | None:
        """Return all new tokens as an event, or None. Raises the request's error after the last event."""
        stream = self.stream
        if stream.num_pending or stream.finish_reason:
            token_ids, logprobs = stream.take()
            return TokenEvent(
                token_ids,
                logprobs,
                stream.finish_reason,
                self.num_cached_tokens,
                self.timeline(),
                stream.take_prompt_logprobs(),
                stream.pooled,
                self.weight_version,
            )
        if self._error is not None:
            raise self._error
        return None

    def timeline(self) -> RequestTimeline:
        """Return the latency breakdown so far."""
        return self._reports.timeline(self.attempts, self.forecast, self.admitted)


def _nothing(state: RequestState) -> None:
    """Default of `on_move`."""
