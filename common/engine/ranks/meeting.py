"""Where the ranks of a worker find each other before their first sum. No torch: a plan names it."""

from __future__ import annotations

import msgspec


class Meeting(msgspec.Struct, frozen=True):
    """A file that all ranks of one host reach, or for those of several hosts a port of rank 0's."""

    file: str = ""
    host: str = ""
    port: int = 0
