"""Check of the files of `AccessControl` by a process that does not serve. Imports none of the server's packages."""

from __future__ import annotations

import os

from common.config import RouterConfig
from router.access.audit import open_log
from router.access.keys import KeySource
from router.access.tls import Certificate


def check_access_files(config: RouterConfig) -> None:
    """Read the key file and the certificate, and open the audit log. Raises ConfigError if one cannot be used."""
    KeySource(config)
    if config.tls_cert:
        Certificate(config.tls_cert, config.tls_key)
    if config.audit_log:
        os.close(open_log(config.audit_log))
