"""An executor for vLLM's engine that samples the same token for every scheduled request, without a model.

It runs in vLLM's own environment: `benchmarks.router.vllm_arm` copies this file to where that finds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

TOKEN = int(os.environ.get("STAND_IN_TOKEN", "0"))
MEMORY_BYTES = 1 << 36


@dataclass
class Progress:
    """Tokens of a request's prompt, and those of it and its output that were computed."""

    num_prompt: int
    num_computed: int


class StandInExecutor(Executor):  # type: ignore[misc]
    """Answers the engine's questions about workers as if there were one with much memory."""

    def _init_executor(self) -> None:
        self._running: dict[str, Progress] = {}

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        match method:
            case "get_kv_cache_spec":
                size = self.vllm_config.cache_config.block_size or 16
                spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
                return [{"model.layers.0.self_attn.attn": spec}]
            case "determine_available_memory":
                return [MEMORY_BYTES]
            case "get_supported_kv_cache_layouts":
                return [["NHD"]]
            case "get_supported_tasks":
                return [("generate",)]
            case _:
                return [None]

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = self._step(scheduler_output)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def _step(self, scheduled: Any) -> Any:
        """A token for each request whose prompt is computed with this step."""
        for new in scheduled.scheduled_new_reqs:
            self._running[new.req_id] = Progress(len(new.prompt_token_ids or ()), new.num_computed_tokens)
        tokens = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            progress = self._running[request_id]
            progress.num_computed += count
            tokens.append([TOKEN] if progress.num_computed >= progress.num_prompt else [])
        ids = list(scheduled.num_scheduled_tokens)
        for request_id in scheduled.finished_req_ids:
            self._running.pop(request_id, None)
        places = {request_id: place for place, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)

    def take_draft_token_ids(self) -> None:
        """It drafts none."""

    def check_health(self) -> None:
        """It is always well."""

    def shutdown(self) -> None:
        """It holds nothing."""
