"""What the programs beside this one share: the tool, the question, and how each says what it found."""

from __future__ import annotations

import json
import sys
from typing import Any

NAME, ABOUT, RESULT = "get_weather", "The weather in a city.", "18 degrees and sunny"
QUESTION, CITY = "What is the weather in Paris?", "Paris"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    ASKED.append(city)
    return RESULT


def place() -> tuple[str, str]:
    """The service's address and the model's name, which the test hands over."""
    return sys.argv[1], sys.argv[2]


def tell(**found: Any) -> None:
    """The last line of the output is what the test reads."""
    print(json.dumps(found | {"asked": ASKED}))
