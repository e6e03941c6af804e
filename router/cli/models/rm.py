"""`diptych rm MODEL`: delete models from this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.arguments import CommandParser
from common.errors import ModelError
from common.model_files import LocalModel, find_model, local_models, remove_model
from common.observe import in_bytes
from router.cli.models.flags import add_models_dir, complete_models


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych rm`."""
    parser = CommandParser(
        "diptych rm",
        description="Delete models from this machine. A model that a service on this machine uses is not deleted.",
    )
    parser.add_argument("model", nargs="+", metavar="MODEL", help="name as in `diptych ls`, or its last part")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_models_dir(parser)
    complete_models(parser)
    return parser


def _agrees(model: LocalModel) -> bool:
    first, num_files = model.owned[0], sum(path.is_file() and not path.is_symlink() for path in model.owned)
    what = f"{num_files} files in {first.parent}" if num_files > 1 else first
    try:
        answer = input(f"Delete {model.name} ({in_bytes(model.owned_bytes)}, {what})? [y/N] ")
    except EOFError:
        print()  # ends the line of the question
        raise ModelError("cannot ask without a terminal: confirm with -y") from None
    return answer.strip().lower() in ("y", "yes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, or 1 if a model was not deleted."""
    options = build_parser().parse_args(argv)
    try:
        known = local_models(options.models_dir)
        for model in [find_model(name, known) for name in options.model]:
            if model.in_use:
                raise ModelError(f"{model.name} is used by a running service: stop it first")
            if not (options.yes or _agrees(model)):
                print(f"{model.name} was not deleted")
                return 1
            freed = in_bytes(remove_model(model))
            is_kept = model.place == "folder" and Path(model.name).is_dir()
            print(f"deleted {model.name}: {freed}{'; other files in the folder are kept' if is_kept else ''}")
    except ModelError as error:
        print(f"diptych rm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
