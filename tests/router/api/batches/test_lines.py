"""Lines of a batch cost neither memory for what is not read of them, nor the event loop's time."""

from __future__ import annotations

import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from router.api.batches import lines
from router.api.batches.lines import TURN_BYTES, InputLine, InvalidLine, parse_line, parsed
from router.request.body import LARGE_BYTES

MIB = 2**20
URL = "/v1/completions"
OBJECTS = "[" + "{}," * (2 * MIB) + "1]"


def request(**members: str) -> bytes:
    """A line whose members are JSON text."""
    plain = {"custom_id": '"a"', "method": '"POST"', "url": f'"{URL}"', "body": '{"prompt":"hi"}', **members}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in plain.items()) + "}").encode()


def outcome(line: bytes) -> Any:
    try:
        return parse_line(1, line, URL)
    except InvalidLine as fault:
        assert len(str(fault)) < 300
        return fault.code, fault.param


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"custom_id": OBJECTS}, ("invalid_request", "custom_id")),
        ({"custom_id": '"' + "x" * 6 * MIB + '"'}, ("invalid_request", "custom_id")),
        ({"method": OBJECTS}, ("invalid_method", "method")),
        ({"url": OBJECTS}, ("url_mismatch", "url")),
        ({"body": f'{{"stream":{OBJECTS}}}'}, ("invalid_request", "body.stream")),
        ({"unknown": OBJECTS}, InputLine(1, "a", b'{"prompt":"hi"}')),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_long_members_are_not_made_into_objects(members: dict[str, str], expected: Any) -> None:
    line = request(**members)
    tracemalloc.start()
    try:
        found = outcome(line)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == expected and peak < len(line) + MIB


def test_members_mean_what_they_meant() -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in "\ud83d\ude00") * 512
    found = parse_line(1, request(custom_id=f' "{escaped}" ', body='{"model":"m","service_tier":"flex"}'), URL)
    assert (found.custom_id, found.model, found.names_class) == ("\U0001f600" * 512, "m", True)
    assert outcome(request(custom_id=f'"{escaped}a"')) == ("invalid_request", "custom_id")
    assert outcome(request(method="[" * 900 + "]" * 900)) == ("invalid_method", "method")
    assert outcome(request(body='{"stream":false,"model":null}')) == InputLine(1, "a", b'{"stream":false,"model":null}')


@pytest.mark.parametrize("value", [b'"Jos\xe9"', b"1e999", b"1" + b"0" * 5000], ids=["latin-1", "float", "integer"])
def test_a_value_that_cannot_be_decoded_is_a_fault_of_its_line(value: bytes) -> None:
    for member in ("custom_id", "method", "url"):
        assert outcome(request(**{member: '"VALUE"'}).replace(b'"VALUE"', value)) == ("invalid_json_line", None)
    for member in ("model", "stream", "background", "service_tier", "request_class"):
        line = request(body=f'{{"{member}":"VALUE"}}').replace(b'"VALUE"', value)
        assert outcome(line) == ("invalid_json_line", None)


@pytest.mark.parametrize("is_long", [True, False])
async def test_a_long_line_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    ran: list[threading.Thread] = []

    def parse(*given: Any) -> InputLine:
        ran.append(threading.current_thread())
        return parse_line(*given)

    monkeypatch.setattr(lines, "parse_line", parse)
    name = "x" * 200 if not is_long else "x" * LARGE_BYTES
    line = request(unknown=f'"{name}"')
    assert await parsed(7, line, URL) == InputLine(7, "a", b'{"prompt":"hi"}')
    assert (ran[0] is threading.main_thread()) is not is_long


class Pieces:
    """A store with one file, which is read in these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def read(self, file_id: str, after: int, num_bytes: int) -> list[tuple[int, bytes]]:
        return [(after + 1, self._pieces[after + 1])] if after + 1 < len(self._pieces) else []


async def lines_in(*pieces: bytes) -> list[tuple[int, bytes | None]]:
    store: Any = Pieces(*pieces)
    return [found async for found in lines.lines_of(store, "file", 8)]


async def test_lines_of_pieces() -> None:
    assert await lines_in(b"") == []
    assert await lines_in(b"a\n\nb") == [(1, b"a"), (3, b"b")]
    assert await lines_in(b"12345", b"678\n 9", b"\n\n") == [(1, b"12345678"), (2, b" 9")]
    assert await lines_in(b"123456789\n1\n123456789") == [(1, None), (2, b"1"), (3, None)]
    assert await lines_in(b"1234", b"56789", b"0\nab\n") == [(1, None), (2, b"ab")]
    assert await lines_in(b"\n \n", b"ab", b"\n\n", b" \n  c") == [(3, b"ab"), (6, b"c")]


async def test_empty_lines_cost_few_turns_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def sleep(_: float) -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(lines, "asyncio", SimpleNamespace(sleep=sleep))
    blank = b"\n \r\n" * 50_000
    assert await lines_in(blank, blank, b"a") == [(200_001, b"a")]
    assert turns < 3 + 2 * len(blank) / TURN_BYTES


async def test_a_line_longer_than_a_turn() -> None:
    long = b"x" * (3 * TURN_BYTES + 5)
    store: Any = Pieces(b"a\n" + long, b"\nb")
    found = [found async for found in lines.lines_of(store, "file", len(long))]
    assert found == [(1, b"a"), (2, long), (3, b"b")]
    found = [found async for found in lines.lines_of(store, "file", len(long) - 1)]
    assert found == [(1, b"a"), (2, None), (3, b"b")]
