from router.planner.budget import Budget
from router.planner.loop import Outlook, PlanLoop, budget_of, goals_of, scaler_of
from router.planner.offered_load import LoadWindow, SampledRequest
from router.planner.pool import Goals
from router.planner.split import SizingForecaster

__all__ = [
    "Budget",
    "Goals",
    "LoadWindow",
    "Outlook",
    "PlanLoop",
    "SampledRequest",
    "SizingForecaster",
    "budget_of",
    "goals_of",
    "scaler_of",
]
