"""Workers that follow a script, on real sockets."""

from ..cluster import cluster, tools  # noqa: F401
