"""Every setting of every Diptych process. docs/configuration.md lists them; a test compares the two.

    ServeConfig                      one machine: how many of each worker
    CommonConfig <- RouterConfig
                 <- WorkerConfig     <- PrefillWorkerConfig, DecodeWorkerConfig
    RankHostConfig                   ranks of a worker on another host

`cluster`, `access`, `roles` and `stored` hold groups of settings that these classes inherit.
"""

from __future__ import annotations

from common.config.classes import CONFIG_CLASSES
from common.config.common import CommonConfig
from common.config.cores import parse_cores
from common.config.decode_worker import DecodeWorkerConfig
from common.config.prefill_worker import PrefillWorkerConfig
from common.config.rank_host import RankHostConfig
from common.config.router import RouterConfig
from common.config.serve import ServeConfig
from common.config.worker import WorkerConfig, is_loopback

__all__ = [
    "CONFIG_CLASSES",
    "CommonConfig",
    "DecodeWorkerConfig",
    "PrefillWorkerConfig",
    "RankHostConfig",
    "RouterConfig",
    "ServeConfig",
    "WorkerConfig",
    "is_loopback",
    "parse_cores",
]
