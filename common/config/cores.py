"""CPU numbers as settings name them: "0-3,8"."""

from __future__ import annotations

from common.errors import ConfigError

CORES = r"([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?"
"""A list, as a regular expression."""


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU numbers of a list such as "0-3,8"; empty for "". Raises ConfigError for a range that runs backwards."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError("cores", text, "CPU numbers and rising ranges, such as 0-3,8")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(dict.fromkeys(cores))
