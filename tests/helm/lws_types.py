"""The fields of a LeaderWorkerSet, as its API defines them, and the pods inside it as Kubernetes does.

From kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go at 024af0845195be26fb4a0847c37d7209849d69da.
"""

from __future__ import annotations

from .chart import Object

POD = "a template"
COUNT = "a whole number"
SHARE = "a whole number or a percentage"
POLICIES = ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")
SPEC: Object = {
    "replicas": COUNT,
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {"partition": COUNT, "maxUnavailable": SHARE, "maxSurge": SHARE},
    },
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
    "leaderWorkerTemplate": {
        "leaderTemplate": POD,
        "workerTemplate": POD,
        "size": COUNT,
        "restartPolicy": POLICIES,
        "subGroupPolicy": {"subGroupPolicyType": ("LeaderWorker", "LeaderExcluded"), "subGroupSize": COUNT},
    },
}


def problems_of_set(item: Object, kubernetes: str) -> list[str]:
    """What the API server would refuse of a LeaderWorkerSet."""
    template = item["spec"].get("leaderWorkerTemplate", {})
    missing = [] if "workerTemplate" in template else ["spec.leaderWorkerTemplate.workerTemplate is missing"]
    extra = [f"{name} is no field" for name in item.keys() - {"apiVersion", "kind", "metadata", "spec"}]
    return missing + extra + _problems(item["spec"], SPEC, "spec", kubernetes)


def _problems(value: object, wanted: object, where: str, kubernetes: str) -> list[str]:
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return [f"{where} is no object"]
        found = [f"{where}.{name} is no field" for name in value if name not in wanted]
        for name in value.keys() & wanted.keys():
            found += _problems(value[name], wanted[name], f"{where}.{name}", kubernetes)
        return found
    if wanted == POD:
        import kubernetes_validate  # two seconds, which no other test should wait for

        try:
            kubernetes_validate.validate(_template(value), kubernetes, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{where}: {error.message}"]
        return []
    if isinstance(wanted, tuple):
        return [] if value in wanted else [f"{where} is {value!r}, none of {wanted}"]
    is_share = wanted == SHARE and isinstance(value, str) and value.removesuffix("%").isdigit() and value.endswith("%")
    return [] if type(value) is int or is_share else [f"{where} is {value!r}, not {wanted}"]


def _template(value: object) -> Object:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": value}
