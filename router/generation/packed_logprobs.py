"""Log-probabilities of successive tokens in flat arrays: an alternative takes 12 bytes, as an object 90."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from common.wire import TokenLogprobs

TOKEN_BYTES, ALTERNATIVE_BYTES = 20, 12
"""What one token takes in the arrays of `PackedLogprobs`, and what each of its alternatives takes."""


class PackedLogprobs(Sequence[TokenLogprobs]):
    """A sequence that grows at its end and makes each item when it is read."""

    __slots__ = ("_ends", "_ids", "_own", "_ranks", "_values")

    def __init__(self, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        self._own, self._ends, self._ranks = array("d"), array("Q"), array("I")
        self._ids, self._values = array("I"), array("d")
        self.extend(logprobs)

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for one in logprobs:
            self._own.append(one.logprob)
            self._ranks.append(one.rank)
            self._ids.extend([token_id for token_id, _ in one.top])
            self._values.extend([value for _, value in one.top])
            self._ends.append(len(self._ids))

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES * len(self._own) + ALTERNATIVE_BYTES * len(self._ids)

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        alternatives = slice(self._ends[place - 1] if place else 0, self._ends[place])
        top = tuple(zip(self._ids[alternatives], self._values[alternatives], strict=True))
        return TokenLogprobs(self._own[place], top, self._ranks[place])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self.__getitem__, range(len(self)))
