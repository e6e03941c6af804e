"""Every setting of every Diptych process. docs/reference/configuration.md lists them; a test compares the two.

    ServeConfig                      one machine: how many of each worker
    CommonConfig <- RouterConfig
                 <- WorkerConfig     <- PrefillWorkerConfig, DecodeWorkerConfig
    RankHostConfig                   ranks of a worker on another host

`cluster` and `scaling` hold groups of settings that these classes inherit.
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
