"""Chained hashes of full KV blocks: equal hash means equal tokens in this block and in every block before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


class BlockHasher:
    """Hashes the blocks of one growing sequence, each once.

    `hash_i = blake2b(hash_{i-1} + tokens of block i)`. The chain starts from the salt, so that tenants with different
    salts never share a block. It leaves the model out: a pool holds the blocks of one model only.
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._tail = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()

    def copy(self) -> BlockHasher:
        """A hasher that goes on from the same blocks."""
        other = BlockHasher(self.block_size)
        other.hashes, other._tail = list(self.hashes), self._tail
        return other

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks of `token_ids`, which must begin with the tokens hashed before."""
        size = self.block_size
        for index in range(len(self.hashes), len(token_ids) // size):
            tokens = array("I", token_ids[index * size : (index + 1) * size]).tobytes()
            self._tail = hashlib.blake2b(self._tail + tokens, digest_size=DIGEST_BYTES).digest()
            self.hashes.append(self._tail)
        return self.hashes


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order."""
    return BlockHasher(block_size, salt).extend(token_ids)
