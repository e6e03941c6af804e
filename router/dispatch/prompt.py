"""The tokens of a prompt as they travel and as they are cached: packed and hashed once for all that answer it."""

from __future__ import annotations

from collections.abc import Sequence

from common.kv.block_hash import BlockHasher
from common.wire.message_fields import pack_tokens


class Prompt:
    """Prompt tokens with the salt of their cached blocks. Requests that share one share what is made of them.

    Raises OverflowError or TypeError, once anything is made of them, for tokens that are no 32-bit token ids.
    """

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids, self._salt = token_ids, salt
        self._packed = b""
        self._hashers: dict[int, BlockHasher] = {}

    @property
    def packed(self) -> bytes:
        """The form in which prompts travel."""
        self._packed = self._packed or pack_tokens(self._token_ids)
        return self._packed

    def hasher(self, block_size: int) -> BlockHasher:
        """One that has hashed the prompt's full blocks, to go on with the tokens of one answer."""
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = BlockHasher(block_size, self._salt)
            hasher.extend(self._token_ids)
        return hasher.copy()
