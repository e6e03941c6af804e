from __future__ import annotations

import threading

import zmq

from common.engine.transfer.mailbox import Mailbox

MANY = 20_000
"""More than a pipe holds wake-ups."""


def test_all_that_is_put_is_taken_in_order() -> None:
    with zmq.Context() as context:
        mailbox: Mailbox[int] = Mailbox(context)
        assert not mailbox.is_waiting and mailbox.take() == []
        giver = threading.Thread(target=lambda: [mailbox.put(number) for number in range(MANY)])
        giver.start()
        got: list[int] = []
        while len(got) < MANY and mailbox.socket.poll(60_000):
            got += mailbox.take()
        giver.join()
        assert got == list(range(MANY)) and mailbox.take() == [] and not mailbox.is_waiting
        mailbox.close_sending()
        mailbox.close()


def test_wake_ups_that_no_pipe_holds_are_no_loss() -> None:
    with zmq.Context() as context:
        mailbox: Mailbox[int] = Mailbox(context)
        for number in range(MANY):
            mailbox.put(number)
        assert mailbox.is_waiting and mailbox.take() == list(range(MANY))
        mailbox.close_sending()
        mailbox.close()
