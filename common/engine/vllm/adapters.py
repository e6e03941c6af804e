"""LoRA adapters of vLLM, by the digest of their files."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ModelError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
LOAD_S = 120.0
"""Maximum time, in seconds, to load an adapter."""
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VllmAdapter:
    """A loaded adapter."""

    digest: str
    name: str
    rank: int
    num_bytes: int
    request: LoRARequest


class VllmAdapters:
    """Adapters that vLLM has loaded. `load` and `retire` are thread-safe, the rest is for the engine thread."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, num_places: int) -> None:
        self._llm, self._loop, self._num_places = llm, loop, num_places
        self._loading, self._lock = threading.Lock(), threading.Lock()
        self._held: dict[str, VllmAdapter] = {}
        self._retired: set[str] = set()
        self._numbers = itertools.count(1)
        self._removing: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def request(self, digest: str) -> LoRARequest | None:
        """Return how vLLM names a loaded adapter, or None."""
        held = self._held.get(digest)
        return None if held is None else held.request

    def load(self, name: str, path: str) -> VllmAdapter:
        """Load the adapter in folder `path`. Blocks. Raises ModelError."""
        began = time.monotonic()
        digest, rank, num_bytes = describe_adapter(Path(path))
        with self._loading:
            with self._lock:
                self._retired.discard(digest)
                if (known := self._held.get(digest)) is not None:
                    return known
                if len(self._held) >= self._num_places:
                    raise ModelError(f"all {self._num_places} adapter slots are in use: raise --max-loras")
            # Without the lock: the engine thread, which loads it, takes the lock in `free`.
            adapter = VllmAdapter(digest, name, rank, num_bytes, self._added(digest, path))
            with self._lock:
                self._held[digest] = adapter
        log.info("adapter %s: loaded from %s in %.2f s: rank %d", name, path, time.monotonic() - began, rank)
        return adapter

    def retire(self, digest: str) -> None:
        """Free an adapter once no request uses it."""
        with self._lock:
            if digest in self._held:
                self._retired.add(digest)

    def free(self, used: frozenset[str]) -> None:
        """Free the retired adapters that are not in `used`."""
        with self._lock:
            gone = [self._held.pop(digest) for digest in self._retired - used]
            self._retired -= {adapter.digest for adapter in gone}
        for adapter in gone:
            task = self._loop.create_task(self._llm.remove_lora(adapter.request.lora_int_id), name="remove adapter")
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)
            log.info("adapter %s: freed its slot", adapter.name)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def _added(self, digest: str, path: str) -> LoRARequest:
        from vllm.lora.request import LoRARequest

        # The name is part of vLLM's block hashes, so blocks of different weights are never confused.
        request = LoRARequest(lora_name=digest, lora_int_id=next(self._numbers), lora_path=path)
        adding = asyncio.run_coroutine_threadsafe(self._llm.add_lora(request), self._loop)
        try:
            adding.result(LOAD_S)
        except FutureTimeoutError as error:
            adding.cancel()
            raise ModelError(f"vLLM did not load the adapter in {path} within {LOAD_S:g} s") from error
        except Exception as error:
            raise ModelError(f"vLLM cannot load the adapter in {path}: {' '.join(str(error).split())}") from error
        return request


def describe_adapter(folder: Path) -> tuple[str, int, int]:
    """Return digest, rank and size in bytes of the adapter in a folder of PEFT's format. Raises ModelError."""
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    try:
        settings = json.loads((folder / "adapter_config.json").read_bytes())
        if weights is None:
            raise ModelError(f"{folder} is not an adapter: it has none of {', '.join(WEIGHTS)}")
        digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        with weights.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest(), int(settings.get("r", 0)), weights.stat().st_size
    except OSError as error:
        raise ModelError(f"{folder} is not an adapter: cannot read {error.filename} ({error.strerror})") from error
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{folder} is not an adapter in PEFT format: {error}") from error
