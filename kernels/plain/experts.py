"""Expert routing and weighted sums of expert outputs in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import Routing

LEAST_SUM = 1e-20
"""Added to the sum of shares, which can be zero with sigmoids."""


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Implements `Kernels.route`."""
    scores = torch.sigmoid(logits) if routing.sigmoid else torch.softmax(logits, dim=-1)
    chosen = _preferred(scores, routing).topk(routing.per_token, dim=-1).indices
    shares = scores.gather(1, chosen)
    if routing.normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen, shares * routing.scale if routing.scale != 1.0 else shares


def _preferred(scores: Tensor, routing: Routing) -> Tensor:
    """Return the selection scores of experts: -inf for those in groups that are not selected."""
    if routing.correction is not None:
        scores = scores + routing.correction
    if routing.groups == 1:
        return scores
    groups = scores.view(len(scores), routing.groups, scores.shape[1] // routing.groups)
    best = groups.topk(1 if routing.correction is None else 2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.kept_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def combine(made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Implements `Kernels.combine`."""
    total = made[places[:, 0]].float() * shares[:, :1]
    for i in range(1, shares.shape[1]):  # one by one, so that the order of additions is the same for all rows
        total += made[places[:, i]].float() * shares[:, i : i + 1]
    return total.to(made.dtype)


def add_gated(x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
    """Implements `Kernels.add_gated`."""
    return x + other if gates is None else (x + other.float() * torch.sigmoid(gates)).to(x.dtype)
