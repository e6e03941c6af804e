"""Calls to vLLM's client, `AsyncLLM`, in our terms. On the engine thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.engine.vllm.link import TransferParams
from common.engine.vllm.requests import sampling_params
from common.errors import RankLost, WireError
from common.observe import DraftMetrics
from common.wire import SamplingParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.outputs import PoolingRequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.metrics.stats import SchedulerStats

Logprobs = Mapping[int, Any]
"""vLLM's log probabilities of one position, by token id."""
NGRAM_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Methods of vLLM that draft from tokens of the sequence, without a model."""
MAX_DRAFT_PLACES = 64
"""Positions in drafts that a `Timeline` may have."""


class CoreDied(RankLost):
    """vLLM's engine core has died, so no request can be served."""


@dataclass(frozen=True, slots=True)
class Added:
    """A request for vLLM. The last `earlier` of `token_ids` are output of the request.

    Yields up to `most_tokens` tokens; 0 for the limit of `params`.
    """

    name: str
    token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: Sequence[int]
    transfer: TransferParams
    earlier: int = 0
    most_tokens: int = 0
    priority: int = 0
    cache_salt: str = ""
    lora: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Verified drafts of a request: `accepted[i]` of them had their token `i` accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: tuple[int, ...] = ()

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], num_tokens: int) -> Drafts:
        """Convert vLLM's counts: `histogram[n]` drafts had `n` tokens accepted."""
        places = range(1, min(len(histogram), MAX_DRAFT_PLACES + 1))
        return cls(sum(histogram), num_tokens, tuple(sum(histogram[place:]) for place in places))


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a request, and its end.

    `reason` is vLLM's finish reason, "" before the end. `prompt_logprobs` are those of all positions of the prompt, in
    one output. `queue_s` is the time from arrival to the first step; None if unknown. `vector` is the pooled prompt of
    a request with `params.pooling`: float32, little-endian, b"" if it is not finite. `drafts` are those of the whole
    request, in its last output, and `num_preemptions` those so far.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] | None = None
    reason: str = ""
    prompt_logprobs: Sequence[Logprobs | None] = ()
    num_cached_tokens: int = 0
    queue_s: float | None = None
    vector: bytes | None = None
    drafts: Drafts = Drafts()
    num_preemptions: int = 0


class Answer(Protocol):
    """A request that vLLM computes."""

    async def next(self) -> Output:
        """Wait for more tokens. Tokens of several steps are merged if it is called late. Raises CoreDied."""

    async def abort(self) -> None:
        """End the request. Harmless if it has ended."""


class Client(Protocol):
    """vLLM's engine, as far as serving needs it."""

    async def add(self, added: Added) -> Answer:
        """Add a request. Must not be cancelled. Raises WireError if vLLM refuses it, CoreDied."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Returns False while requests use some."""

    @property
    def has_died(self) -> bool:
        """Whether the engine core has died."""


class VllmClient:
    """`Client` of a running vLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        # vLLM's first model runner draws from the beginning of a seed's sequence for every request.
        self._mixes_seed = not llm.vllm_config.use_v2_model_runner
        pooler = llm.vllm_config.model_config.pooler_config
        self._pooling_task = pooler.task if pooler is not None else None

    async def add(self, added: Added) -> VllmAnswer:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.pooling_params import PoolingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            collector = await self._llm.add_request(
                added.name,
                tokens_input(list(added.token_ids), cache_salt=added.cache_salt or None),
                PoolingParams(task=self._pooling_task, use_activation=False)
                if added.params.pooling
                else sampling_params(
                    added.params,
                    num_prompt_tokens=len(added.token_ids),
                    earlier=added.earlier,
                    eos_token_ids=added.eos_token_ids,
                    transfer=added.transfer,
                    most_tokens=added.most_tokens,
                    mixes_seed=self._mixes_seed,
                ),
                lora_request=added.lora,
                priority=added.priority,
            )
        except EngineDeadError as error:
            raise CoreDied(str(error)) from error
        except (VLLMValidationError, ValueError) as error:
            raise WireError(" ".join(str(error).split())) from error
        return VllmAnswer(self._llm, collector)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._llm.reset_prefix_cache())

    @property
    def has_died(self) -> bool:
        return bool(self._llm.errored)


class VllmAnswer:
    """`Answer` of a running vLLM."""

    def __init__(self, llm: AsyncLLM, collector: RequestOutputCollector) -> None:
        self._llm, self._collector = llm, collector

    async def next(self) -> Output:
        from vllm.outputs import PoolingRequestOutput
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            output = self._collector.get_nowait() or await self._collector.get()
        except EngineDeadError as error:
            raise CoreDied(str(error)) from error
        if isinstance(output, PoolingRequestOutput):
            return pooled_output(output)
        [found] = output.outputs
        times, drafted = output.metrics, found.spec_decode_metrics
        is_timed = times is not None and bool(times.scheduled_ts)
        return Output(
            found.token_ids,
            found.logprobs,
            (found.finish_reason or "error") if output.finished else "",
            output.prompt_logprobs or (),
            output.num_cached_tokens or 0,
            max(0.0, times.scheduled_ts - times.queued_ts) if is_timed else None,
            num_preemptions=times.num_preemptions if times is not None else 0,
            drafts=Drafts.of_histogram(drafted.histogram, drafted.num_draft_tokens)
            if drafted is not None
            else Drafts(),
        )

    async def abort(self) -> None:
        await self._llm.abort(self._collector.request_id, internal=True)


class DraftCounter:
    """Counts the verified drafts of all steps in `metrics`, once set. vLLM calls its methods: a logger of statistics.

    Unlike the outputs of requests, steps include the drafts of answers that are aborted.
    """

    def __init__(self) -> None:
        self.metrics: DraftMetrics | None = None
        self._source = ""

    def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> DraftCounter:
        """Serve as the factory of itself."""
        if (speculation := vllm_config.speculative_config) is not None:
            self._source = "ngram" if speculation.method in NGRAM_METHODS else "model"
        return self

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        found = scheduler_stats.spec_decoding_stats if scheduler_stats is not None else None
        if found is not None and self.metrics is not None:
            accepted = found.num_accepted_tokens_per_pos
            self.metrics.count(found.num_drafts, found.num_draft_tokens, accepted, self._source)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


def pooled_output(output: PoolingRequestOutput[Any]) -> Output:
    """Convert the output of a pooled prompt. It has no vector if vLLM ended the request without one."""
    vector = output.outputs.data.float().cpu()
    if output.error is not None or not vector.numel():
        return Output(reason="error")
    packed = vector.numpy().astype("<f4").tobytes() if vector.isfinite().all() else b""
    return Output(reason="stop", num_cached_tokens=output.num_cached_tokens or 0, vector=packed)
