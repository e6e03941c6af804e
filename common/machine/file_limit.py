"""How many file descriptors a process may have."""

from __future__ import annotations

import resource

ENOUGH = 65_536
"""Descriptors: the connections of all clients and workers, some times over."""


def raise_file_limit() -> None:
    """Raise the limit to what the system allows, up to ENOUGH: a silent connection holds one until it is cut."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
