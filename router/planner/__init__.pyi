from router.planner.budget import Budget
from router.planner.loop import Outlook, PlanLoop, budget_of, goals_of, scaler_of
from router.planner.offered_load import LoadWindow, SampledRequest
from router.planner.on_demand import (
    LOOK_S,
    ModelReport,
    OnDemandFolder,
    Report,
    ServiceSettings,
    Wanted,
    WantedModel,
    WorkerMemory,
    memory_budget,
)
from router.planner.pool import Goals
from router.planner.residency import Residency, Stage, load_failed
from router.planner.split import SizingForecaster

__all__ = [
    "Budget",
    "Goals",
    "LOOK_S",
    "LoadWindow",
    "ModelReport",
    "OnDemandFolder",
    "Outlook",
    "PlanLoop",
    "Report",
    "Residency",
    "SampledRequest",
    "ServiceSettings",
    "SizingForecaster",
    "Stage",
    "Wanted",
    "WantedModel",
    "WorkerMemory",
    "budget_of",
    "goals_of",
    "load_failed",
    "memory_budget",
    "scaler_of",
]
