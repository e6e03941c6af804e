"""The command line of `diptych simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.arguments import CommandParser
from router.policy import POLICIES

PROG = "diptych simulate"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych simulate`."""
    parser = CommandParser(
        PROG,
        description="Simulate a scenario in virtual time: real routers and schedulers, modelled steps and links.",
    )
    parser.add_argument("scenario", type=Path, help="TOML or JSON file of the scenario (see docs/guides/simulate.md)")
    parser.add_argument(
        "--policy",
        default="",
        metavar="NAME[,NAME...]",
        help=f"routing policies to compare: {', '.join(POLICIES)}, or module:Class (default: that of the scenario)",
    )
    parser.add_argument(
        "--seed", type=int, default=-1, metavar="N", help="random seed; -1 keeps that of the scenario (default -1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the scenario and all results")
    parser.add_argument("--no-progress", action="store_true", help="do not show a progress bar")
    return parser
