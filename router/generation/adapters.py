"""What the endpoints use of a model's LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from common.errors import ModelNotFound, Unavailable
from router.fleet import KnownAdapter, Outcome


class ServedAdapters(Protocol):
    """The adapters of one model: see `AdapterOrders`."""

    def has(self, name: str) -> bool: ...
    def names(self) -> Iterator[KnownAdapter]: ...
    def digest_of(self, name: str) -> str: ...
    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome: ...
    async def unload(self, name: str) -> None: ...


class NoAdapters:
    """A model without workers that could hold adapters."""

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterator[KnownAdapter]:
        return iter(())

    def digest_of(self, name: str) -> str:
        raise ModelNotFound(f"there is no adapter {name!r} here", param="model")

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        raise Unavailable("this model takes no adapters")

    async def unload(self, name: str) -> None:
        raise ModelNotFound(f"there is no adapter {name!r} here", param="lora_name")


NO_ADAPTERS = NoAdapters()
