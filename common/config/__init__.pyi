from common.config.common import CommonConfig
from common.config.decode_worker import USUAL_SEQS, DecodeWorkerConfig
from common.config.field import AUTO, GOAL_MS, Config, Field, fields_of, to_argv, to_env
from common.config.flags import FlagParser, describe, group_order
from common.config.prefill_worker import PrefillWorkerConfig
from common.config.rank_host import RankHostConfig
from common.config.request_class import BATCH_CLASSES, COMMON_SHARE, DEFAULT, NO_LANE, RequestClass
from common.config.router import MEMORY, OFF, RouterConfig
from common.config.serve import ServeConfig
from common.config.sources import (
    CONFIG_CLASSES,
    OTHER_VARIABLES,
    Sources,
    as_flag,
    command_parser,
    counterpart,
    counterpart_env,
    exit_refused,
    load,
    located,
    with_flag,
)
from common.config.vllm import check_installed, pipeline_argument, vllm_version
from common.config.worker import ADAPTER_NAME, WorkerConfig, is_loopback, parse_cores

__all__ = [
    "ADAPTER_NAME",
    "AUTO",
    "BATCH_CLASSES",
    "COMMON_SHARE",
    "CONFIG_CLASSES",
    "CommonConfig",
    "Config",
    "DEFAULT",
    "DecodeWorkerConfig",
    "Field",
    "FlagParser",
    "GOAL_MS",
    "MEMORY",
    "NO_LANE",
    "OFF",
    "OTHER_VARIABLES",
    "PrefillWorkerConfig",
    "RankHostConfig",
    "RequestClass",
    "RouterConfig",
    "ServeConfig",
    "Sources",
    "USUAL_SEQS",
    "WorkerConfig",
    "as_flag",
    "check_installed",
    "command_parser",
    "counterpart",
    "counterpart_env",
    "describe",
    "exit_refused",
    "fields_of",
    "group_order",
    "is_loopback",
    "load",
    "located",
    "parse_cores",
    "pipeline_argument",
    "to_argv",
    "to_env",
    "vllm_version",
    "with_flag",
]
