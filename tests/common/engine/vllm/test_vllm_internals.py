"""What `common.engine.vllm.connector` relies on in vLLM. A new version of vLLM fails here first."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from common.wire.messages import KVTarget

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's imports
]


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_the_connector_overrides_methods_with_the_signatures_of_their_base() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from common.engine.vllm.connector import DiptychConnector

    assert not DiptychConnector.__abstractmethods__
    for name in [
        "__init__",
        "on_new_request",
        "get_loaded_kv_cache_group_ids",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "get_kv_connector_stats",
        "register_kv_caches",
        "handle_preemptions",
        "start_load_kv",
        "wait_for_layer_load",
        "wait_for_save",
        "save_kv_layer",
        "get_transfer_results",
        "shutdown",
    ]:
        base, ours = getattr(KVConnectorBase_V1, name), getattr(DiptychConnector, name)
        assert parameters(ours) == parameters(base), name
    name = "request_finished_all_groups"
    assert parameters(getattr(DiptychConnector, name)) == parameters(getattr(SupportsHMA, name))
    assert "_kv_cache_manager" in source(KVConnectorBase_V1.bind_kv_cache_manager)
    assert "_kv_cache_config" in source(KVConnectorBase_V1.__init__)
    assert parameters(KVConnectorBase_V1._get_connector_metadata) == []


def test_results_of_transfers_have_their_fields() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    assert fields(KVConnectorTransferResults) >= {"finished_sending", "finished_recving", "failed_recving"}


def test_requests_and_steps_have_their_attributes() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    assert fields(SchedulerOutput) >= {"num_scheduled_tokens", "preempted_req_ids"}
    made = source(Request.__init__)
    for name in [
        "request_id",
        "status",
        "kv_transfer_params",
        "num_prompt_tokens",
        "num_computed_tokens",
        "prompt_token_ids",
        "structured_output_request",
    ]:
        assert f"self.{name}" in made, name
    assert isinstance(Request.num_tokens, property)
    for name in ("RUNNING", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
        assert name in RequestStatus.__members__
    assert parameters(StructuredOutputGrammar.accept_tokens) == ["request_id", "tokens"]


def test_the_cache_manager_tells_tables_and_free_blocks() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

    assert parameters(KVCacheManager.get_block_ids) == ["request_id"]
    assert "self.block_pool" in source(KVCacheManager.__init__)
    assert parameters(BlockPool.get_num_free_blocks) == [] and "self.num_gpu_blocks" in source(BlockPool.__init__)
    assert "self.null_block" in source(BlockPool.__init__)  # block 0, which no request owns
    assert callable(KVCacheBlocks.get_block_ids)


def test_caches_are_described_by_specs() -> None:
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig
    from vllm.v1 import kv_cache_interface as kv

    assert fields(kv.KVCacheConfig) >= {"num_blocks", "kv_cache_groups"}
    assert parameters(kv.KVCacheConfig.select_transfer_block_ids) == ["block_ids"]
    for name in ("transfer_groups", "transfer_group_ids"):
        assert hasattr(kv.KVCacheConfig, name)
    assert fields(kv.KVCacheGroupSpec) >= {"layer_names", "kv_cache_spec"}
    assert "block_size" in fields(kv.KVCacheSpec) and "sliding_window" in fields(kv.SlidingWindowSpec)
    assert isinstance(kv.UniformTypeKVCacheSpecs.first_spec, property)
    assert issubclass(kv.MLAAttentionSpec, kv.FullAttentionSpec)
    assert issubclass(kv.SlidingWindowMLASpec, kv.SlidingWindowSpec)
    assert not issubclass(kv.MambaSpec, kv.FullAttentionSpec | kv.SlidingWindowSpec)
    assert fields(CacheConfig) >= {"cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"}
    assert "dtype" in fields(ModelConfig)
    assert parameters(ModelConfig.get_total_num_kv_heads) == []
    assert fields(ParallelConfig) >= {"decode_context_parallel_size", "prefill_context_parallel_size"}
    assert fields(KVTransferConfig) >= {"kv_connector_extra_config", "kv_load_failure_policy", "kv_role"}
    assert "(B, H, N, C)" in source(kv.compute_layer_kv_cache_shape_bytes)


def test_ranks_are_numbered_by_stage_and_tensor_rank() -> None:
    from vllm.distributed import parallel_state

    for name in ("rank_in_group", "world_size"):
        assert f"self.{name}" in source(parallel_state.GroupCoordinator.__init__)
    assert callable(parallel_state.get_tp_group) and callable(parallel_state.get_pp_group)


def test_the_scheduler_calls_in_the_order_that_the_connector_needs() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = source(Scheduler.schedule)
    before, after = schedule.index("_build_kv_connector_meta"), schedule.index("self._update_after_schedule(")
    assert before < after, "num_computed_tokens must not count the step yet when its orders are made"
    update = source(Scheduler.update_from_output)
    assert update.count("self.connector.get_kv_connector_stats()") == 1, "once per step"
    assert update.index("self._update_from_kv_xfer_finished(") < update.index("self.connector.get_kv_connector_stats()")
    assert "self.connector.on_new_request(request)" in source(Scheduler.add_request)
    assert "self.reset_preempted_req_ids" in source(Scheduler._preempt_request)
    assert "preempted_req_ids=self.reset_preempted_req_ids" in schedule
    assert "len(self.requests) > (num_running + num_waiting)" in source(Scheduler.has_finished_requests)
    assert "self.recompute_kv_load_failures" in source(Scheduler._handle_failed_recving)


@pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_ERROR", "FINISHED_ABORTED"])
def test_ranks_cancel_by_themselves_only_what_was_aborted(status: str) -> None:
    """The worker gets all other ends, and only it knows whether the router may retry the request."""
    from vllm.v1.request import RequestStatus

    from common.engine.vllm.connector import SchedulerSide, StepOrders, TrackedRequest
    from common.engine.vllm.link import Send, TransferParams

    request: Any = SimpleNamespace(request_id="a/1", status=RequestStatus[status])
    send = Send(request_id="a", attempt=1, target=KVTarget("d", 1, "tcp://127.0.0.1:7"))
    side = SchedulerSide.__new__(SchedulerSide)
    side._orders = StepOrders()
    side._requests = {"a/1": TrackedRequest(request, TransferParams(send=send), is_open=True)}
    assert side.finished(request) and side._orders.finished == [("a/1", ("a", 1))]
    assert side._orders.cancelled == ([("a", 1)] if status == "FINISHED_ABORTED" else [])


def test_both_model_runners_call_the_connector_around_each_step() -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import kv_connector

    runner = source(gpu_model_runner.GPUModelRunner.execute_model)
    assert "get_kv_transfer_group().handle_preemptions(kv_connector_metadata)" in runner
    assert runner.index("handle_preemptions(") < runner.index("self._update_states(scheduler_output)")
    pre, post = (source(getattr(kv_connector.ActiveKVConnector, name)) for name in ("pre_forward", "post_forward"))
    assert "handle_preemptions(kv_connector_metadata)" in pre
    assert post.index("wait_for_save()") < post.index("get_transfer_results(finished_req_ids)")


def test_the_first_model_runner_turns_back_generators_of_discarded_tokens() -> None:
    """For `keep_draws`, without which this ends a process on a CPU."""
    from vllm.config import DeviceConfig
    from vllm.v1.worker import cpu_model_runner, gpu_input_batch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "gen.set_offset(gen.get_offset() - 4)" in source(GPUModelRunner._bookkeeping_sync), "keep_draws may go"
    assert "self._bookkeeping_sync(" in source(GPUModelRunner.sample_tokens)
    assert parameters(GPUModelRunner.sample_tokens) == ["grammar_output"]
    assert "sample_tokens" in dir(cpu_model_runner.CPUModelRunner)
    assert "self.discard_request_mask.np[:num_reqs] = (" in source(GPUModelRunner)
    assert "generators=self.generators," in source(gpu_input_batch.InputBatch._make_sampling_metadata)
    assert "device_type" in fields(DeviceConfig)


def test_another_host_can_start_its_ranks() -> None:
    """For `common.engine.vllm.follower`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle

    assert "headless" in parameters(AsyncEngineArgs.create_engine_config)
    assert parameters(MultiprocExecutor.__init__) == ["vllm_config", "monitor_workers"]
    assert "self.workers = WorkerProc.wait_for_ready(" in source(MultiprocExecutor._init_executor)
    assert "proc" in fields(WorkerProcHandle)


def test_drafts_are_in_statistics_of_steps_and_requests() -> None:
    from vllm.config import ObservabilityConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from common.engine.vllm.client import DraftCounter

    public = {name for name in dir(StatLoggerBase) if not name.startswith("_")}
    assert public <= set(dir(DraftCounter))
    assert "spec_decoding_stats" in fields(SchedulerStats)
    assert fields(SpecDecodingStats) >= {"num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos"}
    assert "per_request_spec_decode_metrics" in fields(ObservabilityConfig)
    assert "spec_decode_metrics" in fields(CompletionOutput)
    assert fields(RequestSpecDecodeMetrics) >= {"histogram", "num_draft_tokens"}


@pytest.mark.parametrize(("mode", "block_size"), [("none", 8192), ("align", 16)])
@pytest.mark.parametrize("num_drafted", [0, 2])
def test_the_state_of_a_prompt_is_before_those_of_drafts(mode: str, block_size: int, num_drafted: int) -> None:
    import torch
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.request import Request

    from common.engine.vllm.connector import SchedulerSide, num_scratch_blocks

    spec = MambaSpec(
        block_size=block_size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode,
        num_speculative_blocks=num_drafted,
    )  # fmt: skip
    config = KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    manager = KVCacheManager(
        config, max_model_len=8192, scheduler_block_size=block_size,
        hash_block_size=block_size, enable_caching=False,
    )  # fmt: skip
    prompt = list(range(40))
    request = Request(
        request_id="a", prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=8), pooling_params=None
    )
    manager.allocate_slots(request, len(prompt))
    (table,) = manager.get_block_ids("a")
    side = SchedulerSide.__new__(SchedulerSide)
    side._select, side._num_scratch = config.select_transfer_block_ids, [num_scratch_blocks(spec)]
    (chosen,) = side._transferred([table])
    assert chosen[-1:] == tuple(clip_ssm_state_blocks(table, num_drafted)) == (table[len(table) - num_drafted - 1],)
    assert len(chosen) == len(table) - num_drafted
