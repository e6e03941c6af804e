"""Prompt tokens, packed for the wire and hashed for prefix caches once for all requests with the same prompt. Pure.

Hashes of long prompts are cached, so only the new part of a continued conversation is hashed:

turn 1  [ first tokens │ ........... │ tail ]
turn 2  [ first tokens │ ........... │ answer, question ]
          key of the cache            └ hashed from the first differing token
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from common.blocks import DIGEST_BYTES, BlockHasher
from common.wire import TOKEN_BYTES, pack_tokens

FIRST_BYTES = 1024 * TOKEN_BYTES
"""Prompts with the same first 1,024 tokens are compared. Shorter prompts are hashed in half a millisecond."""
ALTERNATIVES = 4
"""Maximum number of cached prompts with the same beginning: conversations after one system prompt, and branches."""
TAIL_BLOCKS = 16
"""A cached prompt is replaced by a new one that differs from it only in the last `TAIL_BLOCKS` blocks."""
MAX_KEPT_HASHES_BYTES = 32 * 1024 * 1024
"""Maximum memory of all cached hashes: half a million blocks."""
HASH_BYTES = 64
"""Memory of one block hash."""

_Key = tuple[int, str, str, bytes]


@dataclass(frozen=True, slots=True)
class _Hashed:
    packed: bytes
    hashes: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.packed) + HASH_BYTES * len(self.hashes)


class PromptHashCache:
    """Cache of the block hashes of recent prompts, up to `max_bytes`. Not thread-safe.

    Prompts with another salt or adapter are never matched, because hits are observable by their latency.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_HASHES_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._prompts: OrderedDict[_Key, list[_Hashed]] = OrderedDict()  # least recently used first

    def hasher(self, packed: bytes, block_size: int, salt: str, adapter: str = "") -> BlockHasher:
        """Return a hasher that has processed the full blocks of a packed prompt."""
        hasher = BlockHasher(block_size, salt, adapter)
        if len(packed) < 2 * FIRST_BYTES:
            hasher.extend_packed(packed)
            return hasher
        key = (block_size, salt, adapter, blake2b(packed[:FIRST_BYTES], digest_size=DIGEST_BYTES).digest())
        prompts = self._prompts.setdefault(key, [])
        self._prompts.move_to_end(key)
        found = max(((_num_equal(one.packed, packed), one) for one in prompts), key=_length, default=None)
        if found is not None:
            num_bytes, before = found
            num_blocks = num_bytes // (TOKEN_BYTES * block_size)
            hasher.resume(before.hashes[:num_blocks])
            if len(before.hashes) - num_blocks <= TAIL_BLOCKS:
                self._drop(prompts, prompts.index(before))
        hasher.extend_packed(packed)
        self._keep(prompts, _Hashed(packed, list(hasher.hashes)))
        return hasher

    def _keep(self, prompts: list[_Hashed], new: _Hashed) -> None:
        prompts.append(new)
        self.num_bytes += new.num_bytes
        if len(prompts) > ALTERNATIVES:
            self._drop(prompts, 0)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._prompts.popitem(last=False)
            self.num_bytes -= sum(one.num_bytes for one in oldest)

    def _drop(self, prompts: list[_Hashed], place: int) -> None:
        self.num_bytes -= prompts.pop(place).num_bytes


def _num_equal(one: bytes, other: bytes) -> int:
    """Return the size in bytes of the common token prefix."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax()) if most else 0
    return TOKEN_BYTES * (first if most and differ[first] else most)


def _length(one: tuple[int, _Hashed]) -> int:
    return one[0]


class Prompt:
    """Prompt tokens with the salt of their block hashes. Packed and hashed on first use.

    Both raise OverflowError or TypeError for tokens that are not 32-bit token ids.
    """

    def __init__(self, token_ids: Sequence[int], salt: str = "", adapter: str = "") -> None:
        """For `adapter` see `BlockHasher`."""
        self._token_ids, self._salt, self._adapter = token_ids, salt, adapter
        self._packed = b""
        self._hashers: dict[int, BlockHasher] = {}

    @property
    def packed(self) -> bytes:
        """The prompt as packed for the wire."""
        self._packed = self._packed or pack_tokens(self._token_ids)
        return self._packed

    def hasher(self, block_size: int, known: PromptHashCache) -> BlockHasher:
        """Return a hasher that has processed the full blocks of the prompt, for one answer to continue."""
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = known.hasher(self.packed, block_size, self._salt, self._adapter)
        return hasher.copy()

    def extend(self, hasher: BlockHasher, output: Sequence[int]) -> list[bytes]:
        """Return the hashes of all full blocks of the prompt and `output`, from a `hasher` of this prompt."""
        return hasher.extend_packed(self.packed + pack_tokens(output))
