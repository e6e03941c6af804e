"""The tokens of a prompt, packed for the wire and hashed for prefix caches, once for all requests that answer it. Pure.

Hashes of long prompts are kept: of a conversation that continues, only the rest is hashed.

turn 1  [ first tokens │ ........... │ tail ]
turn 2  [ first tokens │ ........... │ answer, question ]
          lead to the prompts before    └ hashed: the packed tokens differ from here on
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
"""Prompts that begin with the same 1,024 tokens are compared; shorter ones are hashed in half a millisecond."""
ALTERNATIVES = 4
"""Prompts with the same beginning that are kept: conversations behind one long system prompt, and branches of one."""
TAIL_BLOCKS = 16
"""A prompt that differs from a new one in its last blocks alone is replaced by it."""
MAX_KEPT_HASHES_BYTES = 32 * 1024 * 1024
"""What the hashes of all prompts together may take: half a million blocks."""
HASH_BYTES = 64
"""Memory that the hash of a block takes."""

_Key = tuple[int, str, str, bytes]


@dataclass(frozen=True, slots=True)
class _Hashed:
    packed: bytes
    hashes: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.packed) + HASH_BYTES * len(self.hashes)


class KnownHashes:
    """Prompts of another salt or adapter find nothing: what is known shows in the time. At most `max_bytes` are kept.

    One thread owns it.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_HASHES_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._prompts: OrderedDict[_Key, list[_Hashed]] = OrderedDict()  # the keys that were used last at the end

    def hasher(self, packed: bytes, block_size: int, salt: str, adapter: str = "") -> BlockHasher:
        """A hasher that is through with the full blocks of a prompt, given in its form on the wire."""
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
    """Bytes of the tokens that both begin with."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax()) if most else 0
    return TOKEN_BYTES * (first if most and differ[first] else most)


def _length(one: tuple[int, _Hashed]) -> int:
    return one[0]


class Prompt:
    """Prompt tokens with the salt of their block hashes. Both forms are made when they are first needed.

    Making them raises OverflowError or TypeError for tokens that are not 32-bit token ids.
    """

    def __init__(self, token_ids: Sequence[int], salt: str = "", adapter: str = "") -> None:
        """`adapter`: see `BlockHasher`."""
        self._token_ids, self._salt, self._adapter = token_ids, salt, adapter
        self._packed = b""
        self._hashers: dict[int, BlockHasher] = {}

    @property
    def packed(self) -> bytes:
        """The prompt in its form on the wire."""
        self._packed = self._packed or pack_tokens(self._token_ids)
        return self._packed

    def hasher(self, block_size: int, known: KnownHashes) -> BlockHasher:
        """A hasher that is through with the prompt's full blocks and goes on with the tokens of one answer."""
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = known.hasher(self.packed, block_size, self._salt, self._adapter)
        return hasher.copy()

    def extend(self, hasher: BlockHasher, output: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks of the prompt and the `output` so far, by a `hasher` of this prompt."""
        return hasher.extend_packed(self.packed + pack_tokens(output))
