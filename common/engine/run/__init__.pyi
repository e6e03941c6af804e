from common.engine.run.draft_model import DraftPlan
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.kernel_check import check_model_kernels
from common.engine.run.kv_memory import CUDAMemory, blocks_left, measure, reserve_step_copies
from common.engine.run.loaded import (
    LoadedModel,
    ModelFactories,
    add_score_head,
    blocks_within,
    native_dtype,
    records_steps,
    runner_of,
    task_of,
    use_exact_sums,
)
from common.engine.run.memory_need import LargestSteps, MemoryNeed
from common.engine.run.recorded_steps import Broadcast, RecordedSteps, StepLaunch, StepRecorder, StepSizes, recorder_for
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.seats import SeatChanges
from common.engine.run.step_launchers import StepLauncher, StepThread
from common.engine.run.worker_need import WeightForm, required_memory

__all__ = [
    "CUDAMemory",
    "DraftPlan",
    "GraphRunner",
    "LargestSteps",
    "LoadedModel",
    "ModelFactories",
    "MemoryNeed",
    "ModelRunner",
    "RecordedSteps",
    "RunnableModel",
    "SeatChanges",
    "Broadcast",
    "StepLaunch",
    "StepLauncher",
    "StepRecorder",
    "StepSizes",
    "StepThread",
    "WeightForm",
    "blocks_left",
    "blocks_within",
    "check_model_kernels",
    "use_exact_sums",
    "measure",
    "native_dtype",
    "required_memory",
    "recorder_for",
    "records_steps",
    "reserve_step_copies",
    "runner_of",
    "task_of",
    "add_score_head",
]
