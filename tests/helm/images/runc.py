"""Pods of the rendered chart, run by runc from built images as a kubelet would: user, mounts, environment, command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..chart import Object
from ..cluster import FETCH_TIMEOUT_S, Container

CREDENTIALS = "/run/serviceaccount"


@dataclass(frozen=True)
class Image:
    """A mounted root file system, and the configuration of the image."""

    root: Path
    config: Mapping[str, Any]


def bind(source: Path | str, destination: str, access: str) -> Object:
    """Return a bind mount of an OCI runtime configuration. `access` is "ro" or "rw"."""
    return {"destination": destination, "source": str(source), "type": "bind", "options": ["rbind", access]}


@dataclass
class RuncContainer(Container):
    """A Deployment's containers, isolated except for the network."""

    images: Mapping[str, Image] = field(default_factory=dict)
    """By the last part of the repository's name."""

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        for container in self.spec.get("initContainers", ()):
            done = subprocess.run(self._run(container), capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
            assert done.returncode == 0, done.stdout + done.stderr
        self.process.launch(self._run(self.spec["containers"][0]))

    def _run(self, container: Object) -> list[str]:
        """Write a bundle, and return the command that runs it."""
        bundle = self.folder / container["name"]
        bundle.mkdir()
        subprocess.run(("runc", "spec"), cwd=bundle, check=True, timeout=60)
        spec = json.loads((bundle / "config.json").read_text())
        image = self.images[container["image"].rpartition("/")[2].partition(":")[0]]
        pod, own = self.spec["securityContext"], container["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]} and not own["allowPrivilegeEscalation"]
        variables = dict(each.split("=", 1) for each in image.config["Env"]) | self.variables(container)
        variables |= {**self.overrides, "DIPTYCH_HOST": self.address, "DIPTYCH_KUBERNETES_CREDENTIALS": CREDENTIALS}
        spec["root"] = {"path": str(image.root), "readonly": own["readOnlyRootFilesystem"]}
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": pod["runAsUser"], "gid": pod["runAsGroup"], "additionalGids": [pod["fsGroup"]]},
            "args": [*container["command"], *container["args"]],
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": image.config["WorkingDir"],
            "capabilities": {},
            "noNewPrivileges": True,
        }
        shared = ("network", "cgroup")
        spec["linux"]["namespaces"] = [each for each in spec["linux"]["namespaces"] if each["type"] not in shared]
        mounts = {each["destination"]: each for each in spec["mounts"]}
        for mount in container["volumeMounts"]:
            mounts[mount["mountPath"]] = self._bind(mount, pod["fsGroup"])
        mounts[CREDENTIALS] = bind(self.overrides["DIPTYCH_KUBERNETES_CREDENTIALS"], CREDENTIALS, "ro")
        spec["mounts"] = list(mounts.values())
        (bundle / "config.json").write_text(json.dumps(spec))
        return self._runc("run", "--bundle", str(bundle), f"{self.name}-{container['name']}")

    def _runc(self, *words: str) -> list[str]:
        return ["runc", "--root", str(self.folder.parent / "runc"), *words]

    def _bind(self, mount: Object, group: int) -> Object:
        volume = next(each for each in self.spec["volumes"] if each["name"] == mount["name"])
        folder = self.folder / "volumes" / mount["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in self.rendered.named("ConfigMap", volume["configMap"]["name"])["data"].items():
                (folder / name).write_text(text)
        else:
            assert "emptyDir" in volume, volume
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
        return bind(folder, mount["mountPath"], "ro" if mount.get("readOnly") else "rw")

    def inside(self, script: str) -> str:
        """Output of a shell script in the running container."""
        command = self._runc("exec", f"{self.name}-{self.spec['containers'][0]['name']}", "sh", "-c", script)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
