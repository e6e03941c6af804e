from common.latency.link_model import WORTHWHILE, LinkFit, LinkFits, LinkModel, Links
from common.latency.step_fit import StepFit
from common.latency.step_model import NOTHING, StepModel, StepShape

__all__ = [
    "LinkFit",
    "LinkFits",
    "LinkModel",
    "Links",
    "NOTHING",
    "StepFit",
    "StepModel",
    "StepShape",
    "WORTHWHILE",
]
