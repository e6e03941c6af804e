"""The tokens of a prompt, packed for the wire and hashed for prefix caches, once for all requests that answer it."""

from __future__ import annotations

from collections.abc import Sequence

from common.blocks import BlockHasher
from common.wire import pack_tokens
from router.dispatch.known_hashes import KnownHashes


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
