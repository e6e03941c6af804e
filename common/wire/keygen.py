"""`diptych keygen FILE`: makes a CURVE key pair for --curve-key."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from common.errors import ConfigError
from common.wire.curve import KeyPair, read_key_pair, write_key_pair

PROGRAM = "diptych keygen"


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 2 with one line on stderr when FILE exists already or cannot be written or read."""
    parser = ArgumentParser(
        PROGRAM,
        description="Write a new CURVE key pair to FILE, readable by its owner alone, and print its public key.",
        epilog="Every process of a cluster takes the file by --curve-key FILE. docs/guides/secure.md says more.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--force", action="store_true", help="replace FILE when it is there already")
    parser.add_argument("--public", action="store_true", help="write nothing: print the public key of the pair in FILE")
    options = parser.parse_args(argv)
    try:
        if options.public:
            pair = read_key_pair(options.file)
        else:
            pair = KeyPair.generate()
            write_key_pair(options.file, pair, force=options.force)
    except FileExistsError:
        return refuse(f"{options.file} is there already: --force replaces it, --public prints its public key")
    except (ConfigError, OSError) as error:
        return refuse(str(error))
    print(pair.public.decode())
    return 0


def refuse(why: str) -> int:
    print(f"{PROGRAM}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
