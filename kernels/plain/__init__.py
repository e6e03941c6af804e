"""Plain torch for every device, and slow references for tests."""

from __future__ import annotations

from kernels.plain.experts import add_gated, combine, route
from kernels.plain.host_plan import HostPlan
from kernels.plain.sampling import masked, sample_by_sorting

__all__ = [
    "HostPlan",
    "add_gated",
    "combine",
    "masked",
    "route",
    "sample_by_sorting",
]
