from __future__ import annotations

from common.engine.sequences import Reports
from common.wire import decode, encode
from common.wire.messages import MAX_OUTPUTS, Message, TokenDelta, TokenOutput


def test_reports_of_more_requests_than_a_message_may_have_are_split() -> None:
    emitted: list[Message] = []
    reports = Reports(("w", 1), lambda router, message: emitted.append(message))
    names = [f"r{number}" for number in range(MAX_OUTPUTS + 1)]
    for name in names:
        reports.add_delta(b"router", TokenDelta(name, 0, 0, ()))
    reports.flush()
    received = [decode(encode(message)) for message in emitted]
    assert all(isinstance(each, TokenOutput) for each in received)
    assert [delta.request_id for each in received for delta in each.outputs] == names  # type: ignore[attr-defined]
