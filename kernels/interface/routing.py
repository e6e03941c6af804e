"""Parameters of expert routing."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Parameters of expert routing.

    Scores are the softmax of a row's logits over all experts or, with `sigmoid`, their sigmoids. The `per_token`
    experts with the highest score plus `correction` (float32 [experts], optional) are selected; the first wins ties.
    `groups` divides the experts into equal consecutive groups, of which only the `kept_groups` best are considered. A
    group is rated by its best expert or, with a correction, by the sum of its two best. The share of an expert is its
    score without correction, divided by the sum over the selected experts if `normalised`, times `scale`.
    """

    per_token: int
    normalised: bool
    sigmoid: bool = False
    correction: Tensor | None = None
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
