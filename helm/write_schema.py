"""Generates values.schema.json: `make docs`. Settings come from the configuration classes: typos are refused."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig
from common.config.field import Config, fields_of
from common.config.worker import ADAPTER_NAME
from common.wire.adapter_messages import MAX_ADAPTERS, MAX_PATH
from helm.pod_types import SELECTOR, placement
from helm.schema_types import (
    BYTES,
    BYTES_OR_NOTHING,
    CIDR,
    FLAG,
    FREE,
    LABELS,
    LIST_OF_OBJECTS,
    MAP,
    NAME,
    SERVED,
    TEXT,
    Schema,
    closed,
    many,
    named,
    of_field,
    of_price,
    ref,
    text,
    whole,
)
from router.access.keys import MAX_LIMIT
from router.models.models_file import MAX_MARK_CHARS, MAX_MODELS, MAX_NAMES, MAX_SPLITS

TARGET = Path(__file__).with_name("values.schema.json")
MARK = rf"^\S([\s\S]{{0,{MAX_MARK_CHARS - 2}}}\S)?$"
"""A text without white space around it, as the router reads it."""
# The chart sets these from other values. A second place could contradict the first.
CHART_SETS = frozenset(
    (
        *("host", "port", "http_port", "kv_port", "lend_port"),
        *("advertise_host", "allow_remote", "address_file", "worker_id"),
        *(
            "model",
            "models_file",
            "lora_file",
            "served_model_name",
            "device",
            "tensor_parallel_size",
            "rank_hosts",
            "rank_port",
            "engine",
            "engine_args",
            "drain_timeout_s",
            "config",
            "core_share",
            "weight_share",
            "cores",
        ),
        *("prefill", "decode", "prefill_services", "decode_services", "discovery", "discovery_namespace"),
        *("kubernetes_api", "kubernetes_credentials", "pod_deletion_cost", "slo_ttft_ms", "slo_tpot_ms", "slo_refuse"),
        *("curve_key", "curve_authorized", "api_key", "api_key_file", "tls_cert", "tls_key"),
        *("discovery_file", "prefill_deployment", "decode_deployment", "planner_lease", "response_store"),
    )
)

DIGEST = text(pattern="^(sha256:[0-9a-f]{64})?$")


def settings(cls: type[Config]) -> Schema:
    fields = [field for field in fields_of(cls) if field.name not in CHART_SETS and field.rule.in_file]
    return closed({field.name: of_field(field) for field in sorted(fields, key=lambda field: field.name)})


def router() -> Schema:
    return closed(
        {
            "replicas": whole(0),
            "settings": ref("routerSettings"),
            "readiness": text("auto", "workers", "process"),
            "drainSeconds": whole(0, 86400),
            "preStopSeconds": whole(0, 3600),
            "startupSeconds": whole(10, 86400),
            "responseStore": closed(
                {"type": text("none", "memory", "emptyDir", "claim"), "claimName": TEXT, "size": BYTES}
            ),
            "service": closed(
                {
                    "type": text("ClusterIP", "NodePort", "LoadBalancer"),
                    "port": whole(1, 65535),
                    "annotations": MAP,
                    "nodePort": whole(0, 65535),
                    "loadBalancerClass": TEXT,
                    "loadBalancerSourceRanges": many(CIDR),
                    "externalTrafficPolicy": text("", "Cluster", "Local"),
                    "ipFamilyPolicy": text("", "SingleStack", "PreferDualStack", "RequireDualStack"),
                }
            ),
            "autoscaling": closed(
                {
                    "enabled": FLAG,
                    "minReplicas": whole(1),
                    "maxReplicas": whole(1),
                    "targetCPUPercent": whole(1, 100),
                }
            ),
            **placement(),
        }
    )


def pool(role: str, *, of_its_own: bool) -> Schema:
    """Schema of a pool, or of the defaults of all pools of a role ("" for both roles)."""
    scaling = closed(
        {
            "type": text("none", "hpa", "keda", "planner"),
            "minReplicas": whole(0),
            "maxReplicas": whole(1),
            "price": of_price(),
            "target": {"type": "number", "minimum": 0},
            "hpaMetric": text("pods", "cpu"),
            "targetCPUPercent": whole(1, 100),
            "signal": text("load", "plan"),
            "kedaTrigger": text("metrics-api", "prometheus"),
            "slo": FLAG,
            "pollingSeconds": whole(1),
            "cooldownSeconds": whole(0),
            "heldPerReplica": whole(1),
            "scaleUp": closed(
                {
                    "pods": whole(1),
                    "percent": whole(1),
                    "periodSeconds": whole(1, 1800),
                    "stabilizationSeconds": whole(0, 3600),
                }
            ),
            "scaleDown": closed(
                {"pods": whole(1), "periodSeconds": whole(1, 1800), "stabilizationSeconds": whole(0, 3600)}
            ),
        }
    )
    properties = {
        "replicas": whole(0),
        "image": image(),
        "settings": ref(f"{role or 'worker'}Settings"),
        "accelerator": closed(
            {
                "vendor": text("none", "nvidia", "amd", "intel"),
                "count": whole(0),
                "resource": TEXT,
                "device": TEXT,
            }
        ),
        "engine": text("diptych", "vllm"),
        "engineArgs": many(TEXT),
        "tensorParallelSize": whole(1, 64),
        "rankHosts": whole(1, 64),
        "drainSeconds": whole(0, 86400),
        "preStopSeconds": whole(0, 3600),
        "startupSeconds": {"anyOf": [{"const": 0}, whole(10, 86400)]},
        "livenessSeconds": whole(10, 3600),
        "shm": closed({"enabled": FLAG, "size": BYTES_OR_NOTHING}),
        "kvDisk": closed({"enabled": FLAG, "gib": whole(1, 1_048_576)}),
        "hostPID": FLAG,
        "hostPort": whole(0, 65531),
        "autoscaling": scaling,
        **placement(),
    }
    return closed({"model": NAME, "enabled": FLAG, **properties} if of_its_own else properties)


def sources(**of_hub: Schema) -> Schema:
    """Schema of a model source. `of_hub` are additional keys of sources of type hub."""
    cache = {"cacheClaim": TEXT, "cacheSize": BYTES_OR_NOTHING}
    secret = closed({"name": TEXT, "key": TEXT}, ("name", "key"))
    hub = {"type": {"const": "hub"}, "id": text(pattern=".+"), "tokenSecret": secret, **of_hub, **cache}
    volume = {"type": {"const": "pvc"}, "claimName": text(pattern=".+"), "path": TEXT, **cache}
    image = {
        "type": {"const": "image"},
        "reference": text(pattern=".+"),
        "pullPolicy": text("Always", "IfNotPresent", "Never"),
        "path": TEXT,
        **cache,
    }
    place = {"type": {"const": "path"}, "path": text(pattern="^/.+"), **cache}
    kinds = (
        closed(hub, ("id",)),
        closed(volume, ("claimName",)),
        closed(image, ("reference",)),
        closed(place, ("path",)),
    )
    return {"oneOf": list(kinds)}


def model() -> Schema:
    modes = text("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
    volume = closed({"size": BYTES, "storageClass": TEXT, "accessMode": modes, "keep": FLAG}, ("size",))
    goal = {"type": "number", "minimum": 0}
    names = many(SERVED)
    adapter = closed({"path": TEXT | {"minLength": 1, "maxLength": MAX_PATH}, "revision": TEXT}, ("path",))
    fields = {field.name: field for field in fields_of(RouterConfig)}
    return closed(
        {
            "servedName": TEXT,
            "source": sources(cacheVolume=volume, prefetch=FLAG),
            "tokenizer": sources(),
            "slo": closed({"ttftMs": goal, "tpotMs": goal, "refuse": of_field(fields["slo_refuse"])}),
            "router": ref("router"),
            "adapters": {
                "type": "object",
                "propertyNames": text(pattern=rf"^{ADAPTER_NAME}$"),
                "additionalProperties": adapter | {"type": ["object", "null"]},
                "maxProperties": MAX_ADAPTERS,
            },
            "aliases": names | {"maxItems": MAX_NAMES},
            "fallbacks": many(NAME) | {"maxItems": MAX_NAMES},
            "hold": FLAG,
            "limits": closed(
                {
                    "requestsPerMinute": whole(0, MAX_LIMIT),
                    "tokensPerMinute": whole(0, MAX_LIMIT),
                    "concurrentRequests": whole(0, MAX_LIMIT),
                }
            ),
            **{
                key: of_field(fields[name])
                for key, name in (
                    ("chatTemplate", "chat_template"),
                    ("toolParser", "tool_parser"),
                    ("reasoning", "reasoning"),
                    ("reasoningInForm", "reasoning_in_form"),
                )
            },
            **{
                key: of_field(fields[name]) | {"pattern": MARK}
                for key, name in (("reasoningStart", "reasoning_start"), ("reasoningEnd", "reasoning_end"))
            },
        },
        ("source",),
    ) | {"dependencies": {"reasoningStart": ["reasoningEnd"], "reasoningEnd": ["reasoningStart"]}}


def shared_router() -> Schema:
    weights = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": MAX_LIMIT}}
    split = closed(
        {"name": SERVED, "weights": weights | {"minProperties": 1, "maxProperties": MAX_NAMES}}, ("name", "weights")
    )
    return closed({"enabled": FLAG, "defaultModel": TEXT, "splits": many(split) | {"maxItems": MAX_SPLITS}})


def network() -> Schema:
    block = closed({"cidr": CIDR, "except": many(CIDR)}, ("cidr",))
    peers = many(closed({"podSelector": SELECTOR, "namespaceSelector": SELECTOR, "ipBlock": block}))
    return closed(
        {
            "enabled": FLAG,
            "clients": peers,
            "monitoring": peers,
            "keda": peers,
            "collectors": peers,
            "collectorPorts": many(whole(1, 65535)) | {"minItems": 1},
            "dnsPorts": many(whole(1, 65535)) | {"minItems": 1},
            "apiServerCIDRs": many(CIDR),
            "apiServerPorts": many(whole(1, 65535)) | {"minItems": 1},
            "hubCIDRs": many(CIDR),
            "hubPorts": many(whole(1, 65535)) | {"minItems": 1},
            "nodeCIDRs": many(CIDR),
            "extraIngress": LIST_OF_OBJECTS,
            "extraEgress": LIST_OF_OBJECTS,
        }
    )


def gateway() -> Schema:
    backend = closed(
        {"name": TEXT, "namespace": TEXT, "port": whole(1, 65535), "weight": whole(0)}, ("name", "port", "weight")
    )
    rule = closed({"model": NAME, "matches": LIST_OF_OBJECTS, "weight": whole(0), "backends": many(backend)})
    parent = closed({"name": TEXT, "namespace": TEXT, "sectionName": TEXT, "port": whole(1, 65535)}, ("name",))
    return closed(
        {
            "enabled": FLAG,
            "annotations": MAP,
            "parentRefs": many(parent),
            "hostnames": many(TEXT),
            "weight": whole(0),
            "backends": many(backend),
            "rules": many(rule),
            "requestTimeout": text(pattern=r"^([0-9]{1,5}(h|m|s|ms)){0,4}$"),
            "toInferencePool": FLAG,
        }
    )


def monitoring() -> Schema:
    monitor = closed({"enabled": FLAG, "interval": text(pattern=r"^[0-9]+(ms|s|m)$"), "labels": MAP})
    address = text(pattern="^(https?://[^#]+)?$")
    rules = closed({"enabled": FLAG, "labels": MAP, "runbookURL": address, "disabled": many(TEXT), "alertLabels": MAP})
    return closed(
        {
            "podMonitor": monitor,
            "serviceMonitor": monitor,
            "scrapeAnnotations": FLAG,
            "rules": rules,
            "dashboards": closed({"enabled": FLAG, "labels": MAP, "annotations": MAP}),
            "prometheusAddress": text(pattern="^https?://.+"),
        }
    )


def image(**further: Schema) -> Schema:
    return closed(
        {
            "repository": text(pattern=".+"),
            "tag": TEXT,
            "digest": DIGEST,
            "pullPolicy": text("Always", "IfNotPresent", "Never"),
            **further,
        }
    )


def key_of_secret() -> Schema:
    """Optional key of a Secret: `name` and `key` must be set together."""
    return closed({"name": TEXT, "key": TEXT}) | {"dependencies": {"name": ["key"], "key": ["name"]}}


def ingress() -> Schema:
    return closed(
        {
            "enabled": FLAG,
            "className": TEXT,
            "annotations": MAP,
            "hosts": many(closed({"host": TEXT, "path": TEXT, "model": NAME}, ("host",))),
            "tls": many(closed({"secretName": TEXT, "hosts": many(TEXT)})),
        }
    )


def tls() -> Schema:
    issuer = closed({"name": TEXT, "kind": TEXT, "group": TEXT})
    return closed(
        {
            "existingSecret": TEXT,
            "certManager": closed({"enabled": FLAG, "issuerRef": issuer, "dnsNames": many(TEXT)}),
        }
    )


def pools(role: str) -> Schema:
    """Schema of the pools of one role and their defaults."""
    return closed({"defaults": pool(role, of_its_own=False), "pools": named(pool(role, of_its_own=True))})


def definitions() -> Schema:
    """Definitions that several places reference."""
    # A setting for all workers must exist for both roles.
    decode_settings = settings(DecodeWorkerConfig)["properties"]
    shared = {
        name: field for name, field in settings(PrefillWorkerConfig)["properties"].items() if name in decode_settings
    }
    return {
        "routerSettings": settings(RouterConfig),
        "prefillSettings": settings(PrefillWorkerConfig),
        "decodeSettings": settings(DecodeWorkerConfig),
        "workerSettings": closed(shared),
        "router": router(),
    }


def values() -> Schema:
    """Schema of the chart values, without the referenced definitions."""
    digests = closed(dict.fromkeys(("cpu", "cuda", "rocm"), DIGEST))
    account = closed({"create": FLAG, "name": TEXT, "annotations": MAP})
    endpoint_picker = closed({"name": TEXT, "port": whole(1, 65535)})
    return closed(
        {
            "global": FREE,
            "nameOverride": TEXT,
            "fullnameOverride": TEXT,
            "commonLabels": LABELS,
            "imagePullSecrets": many(closed({"name": TEXT}, ("name",))),
            "clusterDomain": text(pattern=r"^[a-z0-9.-]+$"),
            "trustedCA": closed({"configMap": TEXT, "key": text(pattern=".+")}),
            "extraObjects": many({"type": ["object", "string"]}),
            "images": closed({"registry": TEXT, "tag": TEXT, "router": image(), "worker": image(digests=digests)}),
            "models": named(model(), MAX_MODELS),
            "router": ref("router"),
            "sharedRouter": shared_router(),
            "workers": pool("", of_its_own=False),
            "prefill": pools("prefill"),
            "decode": pools("decode"),
            "discovery": closed({"type": text("kubernetes", "dns")}),
            "apiKeys": closed({"existingSecret": TEXT, "key": TEXT}),
            "curve": closed({"existingSecret": TEXT, "key": TEXT, "authorizedKey": TEXT}),
            "tls": tls(),
            "serviceAccount": closed({"router": account, "worker": account}),
            "rbac": closed({"create": FLAG}),
            "podDeletionCost": closed({"enabled": FLAG, "admissionPolicy": FLAG}),
            "networkPolicy": network(),
            "publicPaths": many(text(pattern="^/")) | {"minItems": 1},
            "ingress": ingress(),
            "httpRoute": gateway(),
            "inferencePool": closed({"enabled": FLAG, "endpointPicker": endpoint_picker}),
            "monitoring": monitoring(),
            "test": closed({"apiKeySecret": key_of_secret(), "timeoutSeconds": whole(1, 3600)}),
        }
    )


def document() -> Schema:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Diptych chart; written by make docs",
        "definitions": definitions(),
        **values(),
    }


def render() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
