"""Flags of the commands for models on this machine. Imports no optional package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

MODELS_DIR = "DIPTYCH_MODELS_DIR"


def complete_models(parser: argparse.ArgumentParser, dest: str = "model") -> None:
    """Complete an argument in shells with the names of the models on this machine."""

    def names(**_: object) -> list[str]:
        from common.model_files import local_models  # a shell asks for it, not `--help`

        return [model.name for model in local_models()]

    for action in parser._actions:
        if action.dest == dest:
            action.completer = names  # type: ignore[attr-defined]  # as argcomplete documents it


def add_models_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--models-dir`, with the environment variable as its default."""
    given = os.environ.get(MODELS_DIR)
    parser.add_argument(
        "--models-dir",
        type=lambda text: Path(text).expanduser(),
        default=Path(given).expanduser() if given else None,
        metavar="FOLDER",
        help=f"folder with further models (default: the environment variable {MODELS_DIR})",
    )
