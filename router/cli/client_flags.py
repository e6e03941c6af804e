"""What commands that ask a router have in common: where it is, and the API key."""

from __future__ import annotations

import argparse
import os

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "DIPTYCH_API_KEY"


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """The flag `--api-key`, from the environment where it is not given."""
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"sent as Authorization: Bearer; better in the environment as {KEY_VARIABLE}",
    )
