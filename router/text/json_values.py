"""Counts the values of JSON text before it is parsed: `{},` is three bytes, and an object of 72."""

from __future__ import annotations

from typing import Final

from common.errors import InvalidRequest

MAX_VALUES: Final = 200_000
"""JSON values of a large body, except numbers in lists. Each takes up to 200 bytes of memory once it is parsed."""
MAX_NUMBERS: Final = 2**20
"""Numbers in the lists of a large body: token ids. Each takes up to 48 bytes once it is parsed."""
COUNTED_BYTES = 64 * 1024
"""Bytes of JSON that are counted at a time: this bounds the memory and the time of one step."""
DIGITS_AS_ONES = bytes.maketrans(b"0123456789", b"1" * 10)


class ValueCounter:
    """Counts the values of JSON text while its bytes arrive, in linear time and before any object is made.

    Every value except the first follows a comma, a bracket or a brace outside of strings, which for an empty list or
    object none does. Where the text is not valid JSON, a parser fails before it has made more objects than are counted.
    The end of each `COUNTED_BYTES` may count one value wrongly.
    """

    def __init__(
        self, whose: str, *, max_values: int = MAX_VALUES, max_numbers: int = MAX_NUMBERS, param: str | None = None
    ) -> None:
        """`whose` begins the message of an error, such as "the body has", and `param` is its field."""
        self._whose, self._param, self._max_values, self._max_numbers = whose, param, max_values, max_numbers
        self._num_values = self._num_numbers = 0
        self._in_string = False
        self._rest = b""  # a backslash whose escaped character has not arrived

    def add(self, data: bytes | bytearray) -> None:
        """Count more of the text. Raises InvalidRequest beyond the bounds."""
        for begin in range(0, len(data), COUNTED_BYTES):
            self._count(self._rest + data[begin : begin + COUNTED_BYTES])
            if self._num_values > self._max_values:
                what = f"{self._max_values:,} JSON values in addition to the numbers in lists"
                raise InvalidRequest(f"{self._whose} more than {what}", param=self._param)
            if self._num_numbers > self._max_numbers:
                what = f"{self._max_numbers:,} numbers in lists"
                raise InvalidRequest(f"{self._whose} more than {what}", param=self._param)

    def add_text(self, text: str) -> None:
        """Count one more JSON text, which is whole. Raises InvalidRequest as `add` does."""
        self._in_string, self._rest = False, b""
        self.add(text.encode(errors="surrogatepass"))

    def _count(self, text: bytes) -> None:
        is_cut = (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
        self._rest, text = (text[-1:], text[:-1]) if is_cut else (b"", text)
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = b'"'.join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        outside = outside.translate(DIGITS_AS_ONES, b" \t\r\n")
        num_numbers = outside.count(b",1") + outside.count(b"[1")
        num_empty = outside.count(b"[]") + outside.count(b"{}")
        num_values = outside.count(b",") + outside.count(b"[") + outside.count(b"{") - num_empty
        self._num_numbers += num_numbers
        self._num_values += num_values - num_numbers
