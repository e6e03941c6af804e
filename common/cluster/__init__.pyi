from common.cluster.access import CREDENTIALS, ClusterAccess
from common.cluster.api import KubernetesClient, KubernetesError
from common.cluster.lease import Lease
from common.cluster.scaling import (
    KV_TARGET,
    RATE_WINDOW_S,
    UNLOADED_SLACK,
    DecodeLoad,
    backlog_s,
    prefill_pressure,
    pressure,
    unblocked_share,
)

__all__ = [
    "CREDENTIALS",
    "ClusterAccess",
    "DecodeLoad",
    "KV_TARGET",
    "KubernetesClient",
    "KubernetesError",
    "Lease",
    "RATE_WINDOW_S",
    "UNLOADED_SLACK",
    "backlog_s",
    "prefill_pressure",
    "pressure",
    "unblocked_share",
]
