"""Chained hashes of full KV blocks: equal hash means equal tokens in this block and in every block before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from common.wire import TOKEN_BYTES
from common.wire.messages import BLOCK_HASH_BYTES

DIGEST_BYTES = BLOCK_HASH_BYTES


class BlockHasher:
    """Block hashes of one growing sequence. Each block is hashed once.

    `hash_i = blake2b(hash_{i-1} + tokens of block i)`. The chain starts with a hash of the salt, so tenants with
    different salts never share a block. The adapter is the key of that first hash, because an adapter changes keys and
    values. The model is not hashed: a pool stores the blocks of a single model.
    """

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        """`adapter` is the hexadecimal digest of the adapter's weights, or "" for the base model."""
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._tail = hashlib.blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, key=bytes.fromhex(adapter)
        ).digest()

    @classmethod
    def after(cls, parent: bytes, block_size: int) -> BlockHasher:
        """Return a hasher for the blocks that follow the block with hash `parent`, given only their own tokens."""
        hasher = cls(block_size)
        hasher._tail = parent
        return hasher

    def copy(self) -> BlockHasher:
        """Return an independent hasher with the same blocks."""
        other = BlockHasher(self.block_size)
        other.hashes, other._tail = list(self.hashes), self._tail
        return other

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the hashes of all full blocks of `token_ids`, which must start with the tokens hashed before."""
        size = self.block_size
        return self._extend(array("I", token_ids[len(self.hashes) * size : len(token_ids) // size * size]).tobytes())

    def extend_packed(self, packed: bytes) -> list[bytes]:
        """Same as `extend`, for tokens in their wire format."""
        num_bytes = TOKEN_BYTES * self.block_size
        return self._extend(packed[len(self.hashes) * num_bytes : len(packed) // num_bytes * num_bytes])

    def resume(self, hashes: list[bytes]) -> None:
        """Start from the known hashes of the first blocks. Nothing may have been hashed before."""
        if hashes:
            self.hashes, self._tail = hashes, hashes[-1]

    def _extend(self, new: bytes) -> list[bytes]:
        tail, blake2b, num_bytes = self._tail, hashlib.blake2b, TOKEN_BYTES * self.block_size
        for at in range(0, len(new), num_bytes):
            tail = blake2b(tail + new[at : at + num_bytes], digest_size=DIGEST_BYTES).digest()
            self.hashes.append(tail)
        self._tail = tail
        return self.hashes


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`, in order."""
    return BlockHasher(block_size, salt).extend(token_ids)
