"""The shapes of answers, for the OpenAPI schema only: endpoints write answers as plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AlternativeToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(BaseModel):
    content: list[ContentToken]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class PromptToken(BaseModel):
    """A token of a prompt, or an alternative to one."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentToken]


class OutputItem(BaseModel):
    """A message has `role` and `content`; a call `call_id`, `name` and `arguments`."""

    type: Literal["message", "function_call"]
    id: str
    status: Literal["completed", "incomplete", "in_progress"]
    role: Literal["assistant"] | None = None
    content: list[OutputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """The answer of `/v1/responses`, with the settings of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metadata: dict[str, str]


class AnthropicBlock(BaseModel):
    type: Literal["text", "tool_use", "thinking"]
    thinking: str | None = None
    signature: str | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicUsage(BaseModel):
    """`input_tokens` counts the tokens of the prompt that no prefix cache held."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicError(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicError


class TokenCount(BaseModel):
    input_tokens: int


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int | None
    capabilities: dict[str, Any] | None
    deprecated_at: str | None
    retires_at: str | None
    line: str | None


class AnthropicModelList(BaseModel):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Status(BaseModel):
    status: str


class Readiness(Status):
    """`detail`: a problem that does not stop the service from taking requests."""

    detail: str = ""


class Version(BaseModel):
    version: str


class WorkerStatus(BaseModel):
    """`home`: the role that it was started with. `step_model`: coefficients of its steps, in seconds. `link_model`: of
    the KV transfers that come to it, in seconds and bytes. `max_num_seqs`, `max_step_tokens`: bounds of `batch_cap` and
    `step_tokens`, which say what it does now."""

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
    tokens_per_s: float
    step_time_s: float
    batch_cap: int
    step_tokens: int
    step_model: dict[str, float]
    link_model: dict[str, float]
    block_size: int
    max_num_seqs: int
    max_step_tokens: int
    num_dropped_frames: int
    num_unsent: int
    num_cuts: int


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
    """What happened to a worker `age_s` seconds ago."""

    kind: Literal["found", "gone", "withheld", "back", "ready", "lost", "role"]
    worker: str
    role: str
    detail: str
    age_s: float


class PoolPlanStatus(BaseModel):
    wanted: int
    needed: int
    present: int
    reason: str


class Tails(BaseModel):
    """At the quantile of the goals; 0: nothing to go by, null: a wait without end."""

    ttft_ms: float | None
    tpot_ms: float | None


class PlanStatus(BaseModel):
    """The planner's latest look. `unmet`: why the goals cannot be met, `held`: why the plan does not change, or ""."""

    pools: dict[str, PoolPlanStatus]
    quantile: float
    requests_per_s: float
    goals: Tails
    predicted: Tails
    measured: Tails
    unmet: str
    held: str


class Load(BaseModel):
    """`plan` is null where none is made (`--planner off`); `events` are the latest, newest first."""

    server_load: int
    stages: dict[str, int]
    classes: list[ClassStatus]
    workers: list[WorkerStatus]
    plan: PlanStatus | None
    events: list[WorkerEvent]


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
