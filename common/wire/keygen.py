"""`diptych keygen FILE`: creates a CURVE key pair for --curve-key."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from common.errors import ConfigError
from common.wire.curve import KeyPair, read_key_pair, write_key_pair

PROGRAM = "diptych keygen"


def main(argv: Sequence[str]) -> int:
    """Return exit status 0, or 2 with a line on stderr if FILE exists or cannot be read or written."""
    parser = ArgumentParser(
        PROGRAM,
        description="Write a new CURVE key pair to FILE, readable only by its owner, and print its public key.",
        epilog="Pass the file to all processes of a cluster with --curve-key FILE. See docs/guides/secure.md.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--public", action="store_true", help="print the public key of the pair in FILE, write nothing")
    options = parser.parse_args(argv)
    try:
        if options.public:
            pair = read_key_pair(options.file)
        else:
            pair = KeyPair.generate()
            write_key_pair(options.file, pair, force=options.force)
    except FileExistsError:
        return refuse(f"{options.file} already exists: use --force to replace it, or --public to print its public key")
    except (ConfigError, OSError) as error:
        return refuse(str(error))
    print(pair.public.decode())
    return 0


def refuse(why: str) -> int:
    print(f"{PROGRAM}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
