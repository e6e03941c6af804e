"""What workers make of prompts, as numbers. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import exp, hypot
from operator import mul


def numbers_of(values: bytes) -> array[float]:
    """float32, little-endian as on every machine that this runs on."""
    return array("f", values)


def normalised(vector: array[float]) -> array[float]:
    """The vector of length one that points the same way; one of zeros stays as it is."""
    length = hypot(*vector)
    return array("f", [number / length for number in vector]) if length else vector


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is all zeros."""
    lengths = hypot(*one) * hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


def sigmoid(number: float) -> float:
    """1 / (1 + exp(-number)), also where that exp would overflow."""
    if number >= 0:
        return 1.0 / (1.0 + exp(-number))
    grown = exp(number)
    return grown / (1.0 + grown)
