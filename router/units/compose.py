"""A machine's compose file, for docker and podman."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.units.lab import Accelerator, Unit, device_flags

CONFIG = "/etc/diptych/diptych.toml"
HEADER = """\
# The containers of {host}: docker compose up -d, in this folder. They run as user 10001, who must be able to read
# the key: chown 10001 curve.key
"""


def files(units: Sequence[Unit], registry: str, version: str, accelerator: Accelerator) -> Mapping[str, str]:
    """File name -> content, for one machine."""
    services = {unit.name: _service(unit, registry, version, accelerator) for unit in units}
    content = {
        "name": "diptych",
        "services": services,
        "volumes": {"cache": {}},
        "secrets": {"curve.key": {"file": "./curve.key"}},
    }
    return {"compose.yaml": HEADER.format(host=units[0].host) + "".join(_yaml(content))}


def _service(unit: Unit, registry: str, version: str, accelerator: Accelerator) -> dict[str, Any]:
    image = "diptych-router" if unit.kind == "router" else "diptych-worker"
    tag = version if unit.kind == "router" else f"{version}-{accelerator}"
    flags = (*unit.flags, *device_flags(unit, accelerator, sees_all=accelerator == "rocm"))
    command = [unit.kind, "--config", CONFIG, *flags, "--curve-key", "/run/secrets/curve.key"]
    return {
        "image": f"{registry}/{image}:{tag}",
        "command": [part.replace("$", "$$") for part in command],
        "network_mode": "host",
        "restart": "unless-stopped",
        "stop_grace_period": f"{unit.stop_timeout_s}s",
        "environment": {"HEALTH_URL": unit.health_url, "XDG_STATE_HOME": "/var/cache/diptych/state"},
        "volumes": [f"./diptych.toml:{CONFIG}:ro", "cache:/var/cache/diptych"],
        "secrets": ["curve.key"],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **({} if unit.kind == "router" else _devices(unit, accelerator)),
    }


def _devices(unit: Unit, accelerator: Accelerator) -> dict[str, Any]:
    """What a container sees of its machine: with NVIDIA's runtime one GPU, with ROCm all."""
    if accelerator == "rocm":
        return {"devices": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"], "group_add": ["video", "render"]}
    if accelerator == "cpu":
        return {}
    gpu = {"driver": "nvidia", "device_ids": [str(unit.place)], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [gpu]}}}}


def _yaml(value: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Mappings in blocks; lists and scalars as JSON, which is YAML."""
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield f"{'  ' * depth}{key}:\n"
            yield from _yaml(each, depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {json.dumps(each)}\n"
