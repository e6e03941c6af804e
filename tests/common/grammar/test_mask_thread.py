"""The thread that computes masks of slow grammars."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.grammar.grammar import Constraint
from common.grammar.grammars import MaskThread

WAIT_S = 60.0


class Mask(Constraint):
    """Takes until it may `go_on`."""

    def __init__(self, spent_s: float) -> None:
        super().__init__(None, 32, "no grammar")
        self.spent_s, self.has_begun, self.go_on = spent_s, threading.Event(), threading.Event()

    def allowed(self, output_token_ids: Any) -> Any:
        self.has_begun.set()
        assert self.go_on.wait(WAIT_S)


@pytest.fixture
def thread() -> Iterator[MaskThread]:
    made = MaskThread()
    yield made
    made.close()


def test_the_answer_that_has_used_the_least_time_is_next(thread: MaskThread) -> None:
    done, ready = list[str](), threading.Semaphore(0)

    def submit(name: str, spent_s: float) -> Mask:
        mask = Mask(spent_s)

        def on_ready() -> None:
            done.append(name)
            ready.release()

        thread.submit(mask, (), on_ready)
        return mask

    masks = [submit("first", 9.0)]
    assert masks[0].has_begun.wait(WAIT_S)
    masks += [submit(*each) for each in (("costly", 5.0), ("cheap", 0.1), ("cheap too", 0.1))]
    for mask in reversed(masks):
        mask.go_on.set()
    for _ in masks:
        assert ready.acquire(timeout=WAIT_S)
    assert done == ["first", "cheap", "cheap too", "costly"]


def test_what_waits_at_the_end_is_dropped() -> None:
    thread, done = MaskThread(), list[int]()
    masks = [Mask(float(i)) for i in range(3)]
    for i, mask in enumerate(masks):
        thread.submit(mask, (), lambda i=i: done.append(i))  # type: ignore[misc]
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._closed:
        pass
    for mask in masks:
        mask.go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive() and done in ([], [0])
    thread.submit(masks[0], (), lambda: done.append(9))
    assert 9 not in done
    MaskThread().close()  # that never had a job
