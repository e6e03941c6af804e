"""`diptych fetch NAME`: downloads a model into the cache."""

from __future__ import annotations

import argparse
import sys

from common.errors import ModelError
from common.model_files.builtin import DEFAULT_MODEL, builtin_model
from common.model_files.download import fetch_model
from common.model_files.resolve import resolve_model


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if the model is in the cache, 1 after printing an error to stderr."""
    parser = argparse.ArgumentParser(prog="diptych fetch", description="Download a model into the cache.")
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"built-in name or Hugging Face id (default {DEFAULT_MODEL})"
    )
    parser.add_argument("--force", action="store_true", help="download the model again even if it is in the cache")
    parser.add_argument(
        "--no-weights", action="store_true", help="do not download the weights of a Hugging Face model (for a router)"
    )
    options = parser.parse_args(argv)
    try:
        if options.force:
            fetch_model(builtin_model(options.model), force=True)
        files = resolve_model(options.model, weights=not options.no_weights)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: finished parts are kept, run the same command again to continue", file=sys.stderr)
        return 130
    print(f"{files.model_id}: {', '.join(map(str, files.weights or (files.tokenizer,)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
