"""What HTTP clients of tests trust, loaded once a process.

Every client of httpx loads the 140 certificates of certifi, which takes 25 ms of CPU time even where it speaks plain
HTTP, and tests make thousands of clients: many poll a server until it says what they wait for.
"""

from __future__ import annotations

import functools
import ssl
from typing import Any

import certifi


def load_trust_once() -> None:
    """From now on all clients that trust what certifi trusts share one context. Others get contexts of their own."""
    make = ssl.create_default_context

    @functools.cache
    def shared() -> ssl.SSLContext:
        return make(cafile=certifi.where())

    def context(*arguments: Any, **options: Any) -> ssl.SSLContext:
        return shared() if not arguments and options == {"cafile": certifi.where()} else make(*arguments, **options)

    ssl.create_default_context = context
