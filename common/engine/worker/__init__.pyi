from common.engine.worker.command import run_role
from common.engine.worker.contract import (
    AdapterStore,
    Duty,
    DutyOffer,
    Engine,
    EngineStatus,
    LoadedAdapter,
    ModelFacts,
    RequestReceived,
    RouterLost,
    Send,
    ServedModel,
    WorkerParts,
)
from common.engine.worker.duty import LoopDuty
from common.engine.worker.loop import INBOX_BOUND, PROGRESS_INTERVAL_S, EngineConfig, EngineLoop
from common.engine.worker.loop_model import LoopModel, free_memory
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.process import end_process
from common.engine.worker.step_times import StepRate, StepTimes

__all__ = [
    "AdapterStore",
    "Duty",
    "DutyOffer",
    "Engine",
    "EngineConfig",
    "EngineLoop",
    "EngineStatus",
    "INBOX_BOUND",
    "LoadedAdapter",
    "LoopDuty",
    "LoopModel",
    "ModelFacts",
    "PROGRESS_INTERVAL_S",
    "RequestReceived",
    "RouterLost",
    "Send",
    "ServedModel",
    "StepRate",
    "StepTimes",
    "WorkerMetrics",
    "WorkerParts",
    "end_process",
    "free_memory",
    "run_role",
]
