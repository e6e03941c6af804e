"""User-defined pod fields: security contexts, scheduling, volumes and sidecars. JSON Schema, draft 7."""

from __future__ import annotations

from helm.schema_types import (
    AMOUNTS,
    COUNT_OR_SHARE,
    FLAG,
    FREE,
    LABELS_OR_NOTHING,
    MAP,
    MAP_OR_NOTHING,
    TEXT,
    Schema,
    closed,
    many,
    text,
    whole,
)

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
WEIGHT = whole(1, 100)
REQUIREMENT = closed(
    {"key": TEXT, "operator": text("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"), "values": many(TEXT)},
    ("key", "operator"),
)
SELECTOR = closed({"matchLabels": MAP, "matchExpressions": many(REQUIREMENT)})
TOLERATION = closed(
    {
        "key": TEXT,
        "operator": text("Exists", "Equal", "Lt", "Gt"),
        "value": TEXT,
        "effect": text("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": whole(0),
    }
)
_POLICY = text("Honor", "Ignore")
SPREAD = closed(
    {
        "topologyKey": TEXT,
        "maxSkew": whole(1),
        "whenUnsatisfiable": text("DoNotSchedule", "ScheduleAnyway"),
        "minDomains": whole(1),
        "nodeAffinityPolicy": _POLICY,
        "nodeTaintsPolicy": _POLICY,
    },
    ("topologyKey",),
) | {
    "dependencies": {
        "minDomains": {
            "required": ["whenUnsatisfiable"],
            "properties": {"whenUnsatisfiable": {"const": "DoNotSchedule"}},
        }
    }
}


def affinity() -> Schema:
    """Node and pod affinity."""
    nodes = closed({"matchExpressions": many(REQUIREMENT), "matchFields": many(REQUIREMENT)})
    pods = closed(
        {
            "labelSelector": SELECTOR,
            "namespaceSelector": SELECTOR,
            "namespaces": many(TEXT),
            "topologyKey": TEXT,
            "matchLabelKeys": many(TEXT),
            "mismatchLabelKeys": many(TEXT),
        },
        ("topologyKey",),
    )
    of_nodes = closed(
        {
            REQUIRED: closed({"nodeSelectorTerms": many(nodes)}, ("nodeSelectorTerms",)),
            PREFERRED: many(closed({"weight": WEIGHT, "preference": nodes}, ("weight", "preference"))),
        }
    )
    of_pods = closed(
        {
            REQUIRED: many(pods),
            PREFERRED: many(closed({"weight": WEIGHT, "podAffinityTerm": pods}, ("weight", "podAffinityTerm"))),
        }
    )
    return closed({"nodeAffinity": of_nodes, "podAffinity": of_pods, "podAntiAffinity": of_pods})


def named_object(*required: str) -> Schema:
    """A Kubernetes pod field. Only its required keys are checked."""
    return FREE | {"required": ["name", *required]}


def placement() -> Schema:
    """Scheduling, metadata and additional containers of pods."""
    claim = closed({"name": TEXT, "resourceClaimName": TEXT, "resourceClaimTemplateName": TEXT}, ("name",))
    uses = closed({"name": TEXT, "request": TEXT}, ("name",))
    source = closed({"name": TEXT, "optional": FLAG}, ("name",))
    return {
        "env": many(closed({"name": TEXT, "value": TEXT, "valueFrom": FREE}, ("name",))),
        "envFrom": many(closed({"prefix": TEXT, "configMapRef": source, "secretRef": source})),
        "labels": LABELS_OR_NOTHING,
        "annotations": MAP_OR_NOTHING,
        "podLabels": LABELS_OR_NOTHING,
        "podAnnotations": MAP_OR_NOTHING,
        "podSecurityContext": FREE,
        "securityContext": FREE,
        "extraVolumes": many(named_object()),
        "extraVolumeMounts": many(named_object("mountPath")),
        "initContainers": many(named_object("image")),
        "sidecars": many(named_object("image")),
        "schedulerName": TEXT,
        "resourceClaims": many(claim),
        "hostNetwork": FLAG,
        "hostAliases": many(closed({"ip": TEXT, "hostnames": many(TEXT)}, ("ip", "hostnames"))),
        "dnsConfig": closed({"nameservers": many(TEXT), "searches": many(TEXT), "options": many(named_object())}),
        "nodeSelector": LABELS_OR_NOTHING,
        "tolerations": many(TOLERATION),
        "affinity": affinity(),
        "topologySpread": many(SPREAD),
        "priorityClassName": TEXT,
        "runtimeClassName": TEXT,
        "pdb": closed({"enabled": FLAG, "maxUnavailable": COUNT_OR_SHARE, "minAvailable": COUNT_OR_SHARE}),
        "strategy": closed({"maxSurge": COUNT_OR_SHARE, "maxUnavailable": COUNT_OR_SHARE}),
        "resources": closed({"requests": AMOUNTS, "limits": AMOUNTS, "claims": many(uses)}),
    }
