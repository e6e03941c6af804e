"""The settings of every process, one class each."""

from __future__ import annotations

from common.config.decode_worker import DecodeWorkerConfig
from common.config.field import Config
from common.config.prefill_worker import PrefillWorkerConfig
from common.config.rank_host import RankHostConfig
from common.config.router import RouterConfig
from common.config.serve import ServeConfig

CONFIG_CLASSES: tuple[type[Config], ...] = (
    ServeConfig,
    RouterConfig,
    PrefillWorkerConfig,
    DecodeWorkerConfig,
    RankHostConfig,
)
