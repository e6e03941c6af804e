"""`diptych ls`: list the models on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from common.arguments import CommandParser
from common.errors import ModelError
from common.model_files import DEFAULT_MODEL, LocalModel, local_models
from common.observe import in_bytes
from router.cli.models.flags import add_models_dir
from router.cli.models.table import ago, table

PLACES = {"cache": "Diptych", "hub": "Hugging Face", "folder": "folder"}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `diptych ls`."""
    parser = CommandParser(
        "diptych ls", description="List the models in Diptych's cache, in Hugging Face's cache and in a folder."
    )
    add_models_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def _row(model: LocalModel, now: float) -> tuple[str, ...]:
    used = "in use" if model.in_use else ago(now - model.used) if model.used else "-"
    return model.name, in_bytes(model.num_bytes), model.format, PLACES[model.place], used


def _fields(model: LocalModel) -> dict[str, object]:
    shown = {"name": model.name, "bytes": model.num_bytes, "format": model.format, "place": model.place}
    return shown | {"files": [str(path) for path in model.files], "used": model.used or None, "in_use": model.in_use}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, or 1 if the models folder does not exist."""
    options = build_parser().parse_args(argv)
    try:
        models = local_models(options.models_dir)
    except ModelError as error:
        print(f"diptych ls: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([_fields(model) for model in models], indent=2))
    elif models:
        now = time.time()
        print(table(("NAME", "SIZE", "FORMAT", "PLACE", "LAST USED"), [_row(model, now) for model in models]))
    else:
        print(f"no models on this machine; diptych pull {DEFAULT_MODEL} downloads one", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
