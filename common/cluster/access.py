"""Address of a Kubernetes API server, and a pod's credentials for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ConfigError

CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """API server and credentials. `folder` contains `token`, `ca.crt` (both may change at any time) and `namespace`."""

    url: str
    folder: Path

    @classmethod
    def find(cls, api: str, folder: str, environ: Mapping[str, str] | None = None) -> ClusterAccess:
        """Use the server `api`, or that of the container's environment if empty. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not api and not host:
            raise ConfigError("kubernetes_api", api, "the API server's URL, because KUBERNETES_SERVICE_HOST is not set")
        access = cls((api or f"https://{f'[{host}]' if ':' in host else host}:{port}").rstrip("/"), Path(folder))
        try:
            urlsplit(access.url).port  # noqa: B018 - reading it is the check
        except ValueError as error:
            raise ConfigError("kubernetes_api", access.url, f"a URL such as https://10.0.0.1:443 ({error})") from error
        if access.is_https and not access.token_file.is_file():
            raise ConfigError("kubernetes_credentials", folder, "a folder with a service account's token and ca.crt")
        return access

    @property
    def is_https(self) -> bool:
        return self.url.startswith("https://")

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"

    def namespace(self, configured: str, field: str) -> str:
        """Return the configured namespace, or the pod's own. Raises ConfigError for `field` if there is neither."""
        try:
            name = configured or (self.folder / "namespace").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            name = ""
        if not name:
            raise ConfigError(field, configured, f"a namespace, because {self.folder} contains none")
        return name
