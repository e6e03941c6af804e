from common.engine.worker.command import run_role
from common.engine.worker.duty import Duty, DutyOffer, WorkerParts
from common.engine.worker.engine import Engine, EngineConfig, EngineStatus, RequestReceived, RouterLost, Send
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.process import end_process
from common.engine.worker.step_times import StepRate

__all__ = [
    "Duty",
    "DutyOffer",
    "Engine",
    "EngineConfig",
    "EngineStatus",
    "RequestReceived",
    "RouterLost",
    "Send",
    "StepRate",
    "WorkerMetrics",
    "WorkerParts",
    "end_process",
    "run_role",
]
