"""Calls to vLLM's client, `AsyncLLM`, in our terms. On the engine thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.engine.vllm.link import TransferParams
from common.engine.vllm.requests import sampling_params
from common.errors import RankLost, WireError
from common.wire import SamplingParams

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import PoolingRequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

Logprobs = Mapping[int, Any]
"""vLLM's log probabilities of one position, by token id."""


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
class Output:
    """New tokens of a request, and its end.

    `reason` is vLLM's finish reason, "" before the end. `prompt_logprobs` are those of all positions of the prompt, in
    one output. `queue_s` is the time from arrival to the first step; None if unknown. `vector` is the pooled prompt of
    a request with `params.pooling`: float32, little-endian, b"" if it is not finite.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] | None = None
    reason: str = ""
    prompt_logprobs: Sequence[Logprobs | None] = ()
    num_cached_tokens: int = 0
    queue_s: float | None = None
    vector: bytes | None = None


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
        times = output.metrics
        is_timed = times is not None and bool(times.scheduled_ts)
        return Output(
            found.token_ids,
            found.logprobs,
            (found.finish_reason or "error") if output.finished else "",
            output.prompt_logprobs or (),
            output.num_cached_tokens or 0,
            max(0.0, times.scheduled_ts - times.queued_ts) if is_timed else None,
        )

    async def abort(self) -> None:
        await self._llm.abort(self._collector.request_id, internal=True)


def pooled_output(output: PoolingRequestOutput[Any]) -> Output:
    """Convert the output of a pooled prompt. It has no vector if vLLM ended the request without one."""
    vector = output.outputs.data.float().cpu()
    if output.error is not None or not vector.numel():
        return Output(reason="error")
    packed = vector.numpy().astype("<f4").tobytes() if vector.isfinite().all() else b""
    return Output(reason="stop", num_cached_tokens=output.num_cached_tokens or 0, vector=packed)
