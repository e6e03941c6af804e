"""`diptych api-key NAME`: draws a key, shows it once, and prints the entry for the file of `--api-key-file`.

diptych api-key alice >> keys.toml        # the key itself goes to the terminal (stderr) only
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from router.access.keys import NAME, digest_of

PROG = "diptych api-key"
PREFIX = "dk-"
NUM_RANDOM_BYTES = 32
"""256 bits."""


def draw() -> str:
    """A new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def entry(name: str, key: str) -> str:
    """The table of `name` for the key file."""
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest_of(key.encode()).hex()}"\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Print a new key. Returns exit status 0, or 2 for a name that is refused."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Draws an API key: its entry for --api-key-file goes to stdout, the key itself to stderr, once.",
        allow_abbrev=False,
    )
    parser.add_argument("name", help="who it is for, in logs and metrics: up to 64 letters, digits and . _ -")
    name = parser.parse_args(argv).name
    if not NAME.fullmatch(name):
        print(f"{PROG}: name={name!r} is refused: up to 64 letters, digits and . _ -", file=sys.stderr)
        return 2
    key = draw()
    print(entry(name, key))
    print(f"the key of {name}, shown only now: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
