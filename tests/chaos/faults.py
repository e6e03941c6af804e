"""What can happen to a message on its way, as rules that a `WireProxy` carries out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from common.wire.messages import KVBlocks, Message

DELAY_S = 0.3


class Fault(StrEnum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it leaves after the message behind it
    TRUNCATE = "truncate"  # the second half is missing
    FLIP = "flip"  # one bit is another
    LOSE_FRAME = "lose frame"  # of KV blocks: the last one
    FLIP_FRAME = "flip frame"  # of KV blocks: a bit in the last one


FRAME_FAULTS = (Fault.LOSE_FRAME, Fault.FLIP_FRAME)


@dataclass
class Rule:
    """Does `fault` to messages of one kind: to `times` of them, after letting `skip` pass.

    `where` narrows the kind down. `struck` counts the messages it was done to. One rule is used by one proxy.
    """

    kind: type[Message]
    fault: Fault
    times: int = 1
    skip: int = 0
    delay_s: float = DELAY_S
    where: Callable[[Message], bool] = lambda message: True
    seed: int = 0
    seen: int = 0
    struck: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def takes(self, message: Message) -> bool:
        """Whether this message is to suffer; counts it."""
        if not isinstance(message, self.kind) or not self.where(message) or self.struck >= self.times:
            return False
        self.seen += 1
        if self.seen <= self.skip:
            return False
        if self.fault in FRAME_FAULTS and (not isinstance(message, KVBlocks) or message.sources):
            return False
        self.struck += 1
        return True

    def spoil(self, frames: list[bytes]) -> list[bytes]:
        """The message as it arrives after a truncation or a flipped bit."""
        head, *blocks = frames
        match self.fault:
            case Fault.TRUNCATE:
                return [head[: len(head) // 2], *blocks]
            case Fault.FLIP:
                return [self._flipped(head), *blocks]
            case Fault.LOSE_FRAME:
                return frames[:-1]
            case Fault.FLIP_FRAME:
                return [*frames[:-1], self._flipped(frames[-1])]
            case _:
                return frames

    def _flipped(self, data: bytes) -> bytes:
        bit = self._random.randrange(8 * len(data))
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        return bytes(spoiled)
