"""`python -m benchmarks.reality.router POLICY SEED FLAGS`: a router that chooses workers by a policy of the simulator.

It is the router process of a cluster, with its flags. `diptych` is its own policy; `simulator/policies.py` has the
others. SEED is what chance begins from.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import uvloop

from benchmarks.simulator.policies import POLICIES
from common.config import RouterConfig
from common.config.sources import load
from common.observe.logging import setup_logging
from router.__main__ import run
from router.server.server import listen

PROGRAM = "python -m benchmarks.reality.router"


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    if len(argv) < 2 or argv[0] not in POLICIES:
        raise SystemExit(f"usage: {PROGRAM} {'|'.join(POLICIES)} SEED FLAGS")
    name, seed, *flags = argv
    config = load(RouterConfig, flags, prog=PROGRAM)
    setup_logging("router", config.log_level)
    policy = POLICIES[name](config.local_prefill_threshold, random.Random(seed))
    uvloop.run(run(config, listen(config.host, config.port), policy))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
