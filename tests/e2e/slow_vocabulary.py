"""A prefill worker as a test wants it: its vocabulary takes until a file is there. Arguments: the file, then flags."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from common.grammar import grammars
from prefill_worker.__main__ import main

build_vocabulary = grammars.build_vocabulary


def build_slowly(*model: Any) -> Any:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    return build_vocabulary(*model)


if __name__ == "__main__":
    grammars.build_vocabulary = build_slowly
    raise SystemExit(main(sys.argv[2:]))
