"""Durations of Ollama's `keep_alive`."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from router.api.ollama.fields import OllamaGenerateRequest


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None), (0, 0.0), ("0", 0.0), ("0s", 0.0), ("-0s", 0.0), (300, 300.0), (1.5, 1.5), ("300", 300.0),
        ("5m", 300.0), ("1h30m", 5400.0), ("1.5h", 5400.0), ("+500ms", 0.5), (-1, math.inf), ("-1", math.inf),
        ("-1m", math.inf),
    ],
)  # fmt: skip
def test_a_keep_alive_is_seconds_or_a_duration(given: object, seconds: float | None) -> None:
    fields = OllamaGenerateRequest.model_validate({"keep_alive": given})
    assert fields.keep_alive == (seconds if seconds is None else pytest.approx(seconds))
    assert fields.unloads == (seconds == 0)


@pytest.mark.parametrize("given", ["", "soon", "5 m", "5m-", "nan", "m", "1" * 65, [], {}])
def test_other_values_are_refused(given: object) -> None:
    with pytest.raises(ValidationError, match='must be a number of seconds, or a duration such as "5m"'):
        OllamaGenerateRequest.model_validate({"keep_alive": given})
