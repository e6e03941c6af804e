"""`diptych pull MODEL`: downloads a model into the cache."""

from __future__ import annotations

import argparse
import sys

from common.arguments import CommandParser
from common.errors import ModelError
from common.model_files.builtin import DEFAULT_MODEL, builtin_model
from common.model_files.download import fetch_model
from common.model_files.resolve import resolve_model


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych pull`."""
    parser = CommandParser("diptych pull", description="Download a model into the cache.")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help=f"built-in name, Hugging Face ID, or ID:Q4_K_M for GGUF files (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--force", action="store_true", help="download a built-in model again")
    parser.add_argument("--no-weights", action="store_true", help="download only the files that a router needs")
    parser.add_argument(
        "--engine",
        choices=("diptych", "vllm"),
        default="diptych",
        metavar="ENGINE",
        help="engine that must support the model: diptych (default) or vllm",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit status 0 when the model is in the cache, 1 with one sentence on stderr when not."""
    options = build_parser().parse_args(argv)
    try:
        if options.force:
            fetch_model(builtin_model(options.model), force=True)
        supported = options.engine == "diptych" and not options.no_weights
        files = resolve_model(options.model, weights=not options.no_weights, supported=supported)
    except ModelError as error:
        print(f"diptych pull: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("diptych pull: interrupted; run it again to resume", file=sys.stderr)
        return 130
    print(f"{files.model_id}: {', '.join(map(str, files.weights or (files.tokenizer,)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
