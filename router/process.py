"""`python -m router.process`: one of the processes of a router. `router.cli.serve.router_processes` starts it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config import RouterConfig, exit_refused, load
from common.errors import ConfigError, ModelError
from common.observe import setup_logging
from common.wire import listening
from router.__main__ import PROG, run
from router.siblings.part import RouterPart


def main(argv: Sequence[str]) -> int:
    """Serve the inherited listener until SIGTERM, as process `argv[0]` of the folder `argv[1]`."""
    index, folder, *flags = argv
    listener = listening.inherited()
    assert listener is not None, "the parent process passes a listener"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    config = load(RouterConfig, flags, prog=PROG)
    part = RouterPart(int(index), config.router_processes, Path(folder))
    setup_logging(f"router-{index}", config.log_level, json=config.log_json)
    import uvloop

    try:
        uvloop.run(run(part.share_of(config), listener, part=part))
    except (ConfigError, ModelError) as error:
        exit_refused(error, PROG)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
