from common.engine.run.draft_model import DraftPlan
from common.engine.run.graph_runner import GraphRunner
from common.engine.run.kernel_check import check_model_kernels
from common.engine.run.kv_memory import CUDAMemory, blocks_left, measure, reserve_step_copies
from common.engine.run.loaded import (
    LoadedModel,
    Makers,
    blocks_within,
    compute_exactly,
    native_dtype,
    records_steps,
    runner_of,
    task_of,
    with_score,
)
from common.engine.run.memory_need import LargestSteps, MemoryNeed
from common.engine.run.recorded_steps import RecordedSteps, Spread, StepLaunch, StepRecorder, StepSizes, recorder_for
from common.engine.run.runner import ModelRunner, RunnableModel
from common.engine.run.seats import SeatChanges
from common.engine.run.step_launchers import StepLauncher, StepThread
from common.engine.run.worker_need import WeightForm, need_of

__all__ = [
    "CUDAMemory",
    "DraftPlan",
    "GraphRunner",
    "LargestSteps",
    "LoadedModel",
    "Makers",
    "MemoryNeed",
    "ModelRunner",
    "RecordedSteps",
    "RunnableModel",
    "SeatChanges",
    "Spread",
    "StepLaunch",
    "StepLauncher",
    "StepRecorder",
    "StepSizes",
    "StepThread",
    "WeightForm",
    "blocks_left",
    "blocks_within",
    "check_model_kernels",
    "compute_exactly",
    "measure",
    "native_dtype",
    "need_of",
    "recorder_for",
    "records_steps",
    "reserve_step_copies",
    "runner_of",
    "task_of",
    "with_score",
]
