from __future__ import annotations

import asyncio

from common.observe import SharedText
from common.observe.shared_text import REUSE_S, REUSED_BYTES


class Source:
    """Creates a text, different each time, of `size` bytes once `may_end` is set."""

    def __init__(self, size: int = 1) -> None:
        self.size, self.num_created, self.may_end = size, 0, asyncio.Event()
        self.now = 0.0
        self.text = SharedText(self.create, clock=lambda: self.now)

    async def create(self) -> bytes:
        self.num_created += 1
        await self.may_end.wait()
        return b"%d" % self.num_created * self.size


async def test_concurrent_requests_share_a_text_and_later_ones_get_a_new_one() -> None:
    source = Source()
    requests = [asyncio.create_task(source.text.get()) for _ in range(3)]
    await asyncio.sleep(0)
    requests.pop().cancel()
    source.may_end.set()
    assert await asyncio.gather(*requests) == [b"1", b"1"]
    assert await source.text.get() == b"2"


async def test_a_large_text_is_reused_for_a_while() -> None:
    source = Source(REUSED_BYTES + 1)
    source.may_end.set()
    first = await source.text.get()
    source.now = REUSE_S / 2
    assert await source.text.get() is first
    source.now = REUSE_S
    assert await source.text.get() is not first and source.num_created == 2


async def test_an_error_reaches_all_requests_and_is_not_kept() -> None:
    failing = True

    async def create() -> bytes:
        if failing:
            raise OSError
        return b"ok"

    text = SharedText(create)
    results = await asyncio.gather(text.get(), text.get(), return_exceptions=True)
    assert [type(one) for one in results] == [OSError, OSError]
    failing = False
    assert await text.get() == b"ok"
