"""Every setting of every Diptych process. docs/configuration.md lists them; a test compares the two.

    ServeConfig                      one machine: how many of each worker
    CommonConfig <- RouterConfig
                 <- WorkerConfig     <- PrefillWorkerConfig, DecodeWorkerConfig

Each is made of what its file declares and of groups that others share: `curve`, `cluster`, `access`.
"""

from __future__ import annotations

from diptych.common.config_field import Config
from diptych.common.settings.common import CommonConfig
from diptych.common.settings.decode_worker import DecodeWorkerConfig
from diptych.common.settings.prefill_worker import PrefillWorkerConfig
from diptych.common.settings.router import RouterConfig
from diptych.common.settings.serve import ServeConfig
from diptych.common.settings.worker import WorkerConfig, is_loopback, parse_cores

CONFIG_CLASSES: tuple[type[Config], ...] = (ServeConfig, RouterConfig, PrefillWorkerConfig, DecodeWorkerConfig)

__all__ = [
    "CONFIG_CLASSES",
    "CommonConfig",
    "DecodeWorkerConfig",
    "PrefillWorkerConfig",
    "RouterConfig",
    "ServeConfig",
    "WorkerConfig",
    "is_loopback",
    "parse_cores",
]
