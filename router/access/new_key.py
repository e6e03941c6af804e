"""`diptych api-key NAME`: generates an API key, shows it once, and prints its entry for the `--api-key-file`.

diptych api-key alice >> keys.toml        # the key itself is printed only to the terminal (stderr)
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from common.arguments import CommandParser
from router.access.keys import NAME, digest_of

PROG = "diptych api-key"
PREFIX = "dk-"
NUM_RANDOM_BYTES = 32
"""256 bits."""


def draw() -> str:
    """Generate a key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def entry(name: str, key: str) -> str:
    """Return the key file's table for `name`."""
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest_of(key.encode()).hex()}"\n'


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych api-key`."""
    parser = CommandParser(
        PROG,
        description="Create an API key. Prints its entry for --api-key-file to stdout and the key itself to stderr.",
    )
    parser.add_argument("name", help="name of the key in logs and metrics: up to 64 letters, digits and . _ -")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print a new key. Returns exit status 0, or 2 for a name that is refused."""
    name = build_parser().parse_args(argv).name
    if not NAME.fullmatch(name):
        print(f"{PROG}: invalid name {name!r}: must be up to 64 letters, digits and . _ -", file=sys.stderr)
        return 2
    key = draw()
    print(entry(name, key))
    print(f"API key of {name}, shown only once: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
