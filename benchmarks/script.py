"""Shared by every measuring script: options, rounds in turns, medians, and the results file."""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from benchmarks.load.conditions import conditions, without_folders
from benchmarks.time_limit import time_limit
from common.arguments import CommandParser

T = TypeVar("T")


def script_parser(program: str, about: str | None, *, model: str = "", plot: bool = False) -> ArgumentParser:
    """A parser with `--output`; also `--model`, if `model` explains it, and `--plot`."""
    parser = CommandParser(program, description=about, formatter_class=ArgumentDefaultsHelpFormatter)
    if model:
        parser.add_argument("--model", default="smollm2-135m", help=model)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    if plot:
        parser.add_argument("--plot", type=Path, help="PNG file for a plot")
    return parser


def in_turns(items: Sequence[T], number: int) -> Sequence[T]:
    """The items in the order of round `number`: every second round reverses it, so that no item is always first."""
    return items[::-1] if number % 2 else items


def seconds_of(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds that each of `rounds` calls took."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return samples


def median_ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """The median of each round's ratio; rounds with a zero are left out, and without any round it is 0."""
    ratios = [one / other for one, other in zip(samples, others, strict=True) if one and other]
    return round(statistics.median(ratios), 3) if ratios else 0.0


def settings_of(options: Namespace) -> dict[str, Any]:
    """The options as JSON values, without the files and folders that they name."""
    return {name: _published(value) for name, value in vars(options).items() if not isinstance(value, Path)}


def _published(value: Any) -> Any:
    if isinstance(value, list):
        return [_published(one) for one in value]
    return without_folders(value) if isinstance(value, str) else value


def write_result(
    options: Namespace, program: str, argv: Sequence[str], content: Mapping[str, Any], **more: Any
) -> None:
    """Write `content`, with the conditions and `more` of them, to the file that `--output` names."""
    if options.output:
        from benchmarks.load.report import write_json  # its tables need rich, which a GPU machine may not have

        write_json(options.output, {"conditions": conditions(program, argv, **more), **content})


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a script and exit with its status. At SIGTERM it first ends the processes that it started."""
    with time_limit(0.0):
        raise SystemExit(main(sys.argv[1:]))
