"""How a router's logits become the experts of a row and their shares."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """A row's scores are the softmax of its logits over all experts, or their `sigmoid`s.

    The `per_token` experts of the best scores are chosen, plus their `correction` (float32 [experts]) where there is
    one. With `groups`, equal parts of the experts in their order, only those of the `kept_groups` best: a group is as
    good as its best expert, or, with a correction, as the sum of its two best. Of equals the first wins. A share is an
    expert's score without the correction, over the sum of those chosen where they are `normalised`, times `scale`.
    """

    per_token: int
    normalised: bool
    sigmoid: bool = False
    correction: Tensor | None = None
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
