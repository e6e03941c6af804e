"""Draws one of several models by weight, always the same for the same requester. Pure.

Weighted rendezvous hashing: each model has a score from a hash of its name and the requester, and the best one wins
(Wang and Ravishankar, "Hash-based virtual hierarchies", with the weights of Schindelhauer and Schomaker 2005). When a
weight changes, requesters move only to the model that gained, or from the one that lost.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

HASH_BYTES = 8
"""64 bits: more than a number from 0 to 1 holds."""


def draw(weights: Mapping[str, float], split: str, requester: str) -> str:
    """The model of a requester, such as a user or a request's id. At least one weight is above 0."""
    return max(
        (name for name in weights if weights[name] > 0), key=lambda name: _score(name, split, requester, weights[name])
    )


def _score(name: str, split: str, requester: str, weight: float) -> float:
    digest = hashlib.blake2b(json.dumps([split, name, requester]).encode(), digest_size=HASH_BYTES).digest()
    even = (int.from_bytes(digest) + 0.5) / 2.0 ** (8 * HASH_BYTES)  # from 0 to 1
    return math.inf if even >= 1.0 else -weight / math.log(even)
