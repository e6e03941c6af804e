"""Token sampling in plain torch, and masks, which device kernels also use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.interface import SamplingTensors, to_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None] = ()) -> Tensor:
    """Implements `Kernels.sample`. Without `allowed`, all tokens are allowed."""
    return sample_by_sorting(masked(logits, allowed), rows)


def masked(logits: Tensor | Sequence[Tensor], allowed: Sequence[Tensor | None]) -> Tensor:
    """Set `logits` [n, vocab] to minus infinity where masks forbid tokens. All masks are transferred in one copy."""
    whole = logits if isinstance(logits, Tensor) else torch.stack(list(logits))
    found = [(row, mask.numpy()) for row, mask in enumerate(allowed) if mask is not None]
    if not found:
        return whole
    numbers = np.array([row for row, _ in found], dtype=np.int64)
    rows, words = to_device([numbers, np.stack([mask for _, mask in found])], whole.device)
    shifts = torch.arange(32, dtype=torch.int32, device=whole.device)
    banned = ((words[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, : whole.shape[1]]  # [rows, vocab]
    return whole.index_copy(0, rows, whole.index_select(0, rows).masked_fill_(banned, -torch.inf))


def sample_by_sorting(logits: Tensor, rows: SamplingTensors) -> Tensor:
    """Implement `sample` on any device, in float64."""
    largest, tokens = logits.max(dim=-1)
    tokens = torch.where(largest > -torch.inf, tokens, logits.shape[1])
    drawn = torch.nonzero((rows.temperature > 0) & (largest > -torch.inf)).flatten()
    if not len(drawn):
        return tokens
    rows, logits = rows.select(drawn), logits[drawn]
    vocab = logits.shape[1]
    probs = torch.softmax((logits / rows.temperature[:, None]).double(), dim=-1)
    probs = _keep(probs, probs.amax(-1) * rows.min_p)
    if rows.searches:
        ordered = probs.sort(dim=-1, descending=True).values
        last = torch.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab).long() - 1
        least = ordered.gather(1, last[:, None])[:, 0]
        probs, ordered = _keep(probs, least), _keep(ordered, least)
        mass = ordered.cumsum(-1)
        last = torch.searchsorted(mass, (rows.top_p * mass[:, -1])[:, None]).clamp(max=vocab - 1)
        probs = torch.where(rows.top_p[:, None] < 1.0, _keep(probs, ordered.gather(1, last)[:, 0]), probs)
    mass = probs.cumsum(-1)
    noise = torch.from_numpy(uniform(rows.seed.cpu().numpy(), rows.position.cpu().numpy())).to(mass.device)
    tokens[drawn] = torch.searchsorted(mass, (mass[:, -1] * noise)[:, None], right=True)[:, 0]
    return tokens


def _keep(probs: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(probs >= threshold[:, None], probs, 0.0)


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the noise of each (seed, position), int64 [n]: 53 bits in [0, 1). Uses splitmix64 (Steele, Lea, Flood
    2014): the seed is mixed into the key of a stream, and the position counts within the stream."""
    key = _mix(seed.astype(np.uint64) + _GOLDEN)
    word = _mix(key + (position + 1).astype(np.uint64) * _GOLDEN)
    return np.asarray((word >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
