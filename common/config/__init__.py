"""Settings of all Diptych processes, as docs/reference/configuration.md lists them.

    ServeConfig                      `diptych serve`
    CommonConfig <- RouterConfig
                 <- WorkerConfig     <- PrefillWorkerConfig, DecodeWorkerConfig
    RankHostConfig                   `diptych rank-host`

`cluster` and `scaling` define settings that these classes inherit.
"""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
