"""Response bodies of the service's own endpoints (state, load, tokenizer), for the OpenAPI schema only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Status(BaseModel):
    status: str


class LoadedAdapter(Status):
    """`num_workers` workers have loaded the adapter `id` of the model `parent`. `digest` identifies its weights."""

    id: str
    parent: str
    digest: str
    num_workers: int


class IsPaused(BaseModel):
    is_paused: bool


class IsSleeping(BaseModel):
    is_sleeping: bool


class Sleeping(Status):
    level: int


class WeightInfo(BaseModel):
    """`weight_version` is "default" until the first update."""

    weight_version: str


class UpdatedWeights(WeightInfo):
    """All `num_workers` workers have the weights `weight_version`."""

    success: bool
    message: str
    num_workers: int


class Readiness(Status):
    """`detail`: a problem that does not prevent the service from accepting requests."""

    detail: str = ""


class Version(BaseModel):
    version: str


class WorkerStatus(BaseModel):
    """State of one worker.

    `home`: the role with which it was started. `step_model`: coefficients of its step time, in seconds. `link_model`:
    coefficients of KV transfers to it, in seconds and bytes. `batch_cap` and `step_tokens`: its current limits per
    step, at most `max_num_seqs` and `max_step_tokens`. `window`: the maximum number of tokens that any layer looks
    back; 0: unlimited. `memory_bytes`: size of its weights and KV cache; 0: unknown.
    """

    worker_id: str
    role: str
    home: str
    state: str
    reason: str
    address: str
    num_requests: int
    num_booked_requests: int
    num_queued_tokens: int
    num_available_blocks: int
    num_blocks: int
    num_known_blocks: int
    wait_s: float
    lag_s: float
    tokens_per_s: float
    step_time_s: float
    batch_cap: int
    step_tokens: int
    step_model: dict[str, float]
    link_model: dict[str, float]
    block_size: int
    max_num_seqs: int
    max_step_tokens: int
    window: int
    memory_bytes: int
    num_dropped_frames: int
    num_unsent: int
    num_cuts: int
    model: str


class ClassStatus(BaseModel):
    name: str
    ttft_ms: float
    tpot_ms: float
    priority: int
    num_in_flight: int
    num_waiting: int
    num_held: int
    oldest_wait_s: float
    wait_limit_s: float
    num_refused: int
    attainment: dict[str, float]
    share: float


class WorkerEvent(BaseModel):
    """An event of a worker, `age_s` seconds ago."""

    kind: Literal["found", "gone", "withheld", "back", "ready", "lost", "role"]
    worker: str
    role: str
    detail: str
    age_s: float


class LoggedWarning(BaseModel):
    """A warning or error in the router's log."""

    age_s: float
    text: str


class PoolPlanStatus(BaseModel):
    wanted: int
    needed: int
    present: int
    reason: str


class Tails(BaseModel):
    """Latencies at the quantile of the goals. 0: no data. null: an unlimited wait."""

    ttft_ms: float | None
    tpot_ms: float | None


class PlanStatus(BaseModel):
    """Latest result of the planner. `unmet`: why the goals cannot be met. `held`: why the plan does not change."""

    pools: dict[str, PoolPlanStatus]
    quantile: float
    requests_per_s: float
    goals: Tails
    predicted: Tails
    measured: Tails
    unmet: str
    held: str


class ModelStatus(BaseModel):
    """State of one model. `ready`: whether a worker would answer now. `goals` are those of its pools; 0: none.

    `root` is the `model` of its workers. `idle_s`: seconds since its last request; null while requests are in flight,
    and before the first one. `state` (idle, loading or loaded) and `expires_in_s` are set for models that are loaded on
    demand. `expires_in_s`: time until the model is unloaded; null: never, or not before its requests end.
    """

    id: str
    root: str
    num_in_flight: int
    idle_s: float | None
    max_model_len: int
    ready: bool
    goals: Tails
    classes: list[ClassStatus]
    plan: PlanStatus | None
    state: Literal["idle", "loading", "loaded"] | None
    expires_in_s: float | None


class TimesStatus(BaseModel):
    """Percentiles of `num` observations, in milliseconds; 0 without observations."""

    num: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class RatesStatus(BaseModel):
    """Rates per second over the last `rate_s` seconds."""

    requests_per_s: float
    failed_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens_per_s: float
    transfers_per_s: float
    transfer_bytes_per_s: float


class TrafficStatus(BaseModel):
    """Traffic of this router: rates of the last `rate_s` seconds, latencies of the last `window_s` seconds."""

    rate_s: float
    window_s: float
    rates: RatesStatus
    ttft: TimesStatus
    tpot: TimesStatus
    itl: TimesStatus
    queue: TimesStatus
    transfer: TimesStatus
    exposed_transfer: TimesStatus


class Load(BaseModel):
    """Load of the service. `plan` is null with `--planner off` and for several models.

    `events` and `warnings` of the router's log: newest first.

    For several models, `classes` have the tightest goals and the lowest attainments; `models` have those of each model.
    """

    server_load: int
    models: list[ModelStatus]
    stages: dict[str, int]
    traffic: TrafficStatus
    classes: list[ClassStatus]
    workers: list[WorkerStatus]
    plan: PlanStatus | None
    events: list[WorkerEvent]
    warnings: list[LoggedWarning]


class LoadPoint(BaseModel):
    """The load `at` a Unix time. Rates per second, latencies in milliseconds, shares from 0 to 1; null: no data."""

    at: int
    inFlight: float | None
    waiting: float | None
    requests: float | None
    failed: float | None
    output: float | None
    prompt: float | None
    transferBytes: float | None
    ttftMet: float | None
    tpotMet: float | None
    ttft50: float | None
    ttft99: float | None
    tpot50: float | None
    tpot99: float | None
    prefillKv: float | None
    decodeKv: float | None
    transfer50: float | None


class LoadHistory(BaseModel):
    """Points of the last hour, the oldest first. `started_at`: start of the router's process, in Unix seconds."""

    step_s: int
    started_at: float
    points: list[LoadPoint]


class CandidateStatus(BaseModel):
    """A worker that was considered, with predicted times in milliseconds; null: unlimited.

    `cost_ms` is what the policy compared. `slot_ms`: until the batch has a free slot. `token_ms`: per later token.
    `delays_others_ms`: total delay of running sequences. `is_measured`: whether the predictions come from the worker's
    own steps. `problem`: why it ranks below others.
    """

    worker: str
    role: str
    chosen: bool
    computes_prompt: bool
    cost_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    lag_ms: float | None
    transfer_ms: float | None
    slot_ms: float | None
    token_ms: float | None
    delays_others_ms: float | None
    is_measured: bool
    requests: int
    cached_tokens: int
    problem: str


class DecisionStatus(BaseModel):
    """A routing decision. `kind`: remote (both workers), local (decode worker) or prefill (prefill worker)."""

    at_ms: float
    kind: str
    prefill_worker: str
    decode_worker: str
    reason: str
    candidates: list[CandidateStatus]


class StepStatus(BaseModel):
    """What happened: accepted, waits, held, placed, token, failed, replaced, revoked, restarted, moved or stayed."""

    at_ms: float
    kind: str
    detail: str


class StageStatus(BaseModel):
    """A stage that a request went through. `predicted_ms` is null if it was not predicted."""

    name: str
    began_ms: float
    took_ms: float
    predicted_ms: float | None
    where: str
    waits_for: str


class GoalStatus(BaseModel):
    """A goal, its prediction at the last placement, and the measured time, in milliseconds. null: none."""

    goal_ms: float | None
    predicted_ms: float | None
    measured_ms: float | None
    met: bool | None


class ExplainedChoice(BaseModel):
    """One choice of an answer. `goals` are `ttft` and `tpot`."""

    index: int
    output_tokens: int
    finish_reason: str
    attempts: int
    preemptions: int
    transfer_bytes: int
    stages: list[StageStatus]
    goals: dict[str, GoalStatus]
    steps: list[StepStatus]
    omitted_steps: int
    decisions: list[DecisionStatus]


class Explanation(BaseModel):
    """A request in milliseconds since the arrival of its head. `choices` are the first four of `num_choices`."""

    request_id: str
    id: str
    path: str
    model: str
    key: str
    class_: str = Field(alias="class")
    state: Literal["running", "finished", "failed", "disconnected"]
    status: int | None
    error: str
    reason: str
    arrived_at: str
    total_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_choices: int
    choices: list[ExplainedChoice]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    chat_template: str | None
