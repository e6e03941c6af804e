"""Counting of JSON values and their memory before parsing: `{},` has 3 bytes as text and 72 as an object."""

from __future__ import annotations

from typing import Final

from common.errors import InvalidRequest

MAX_VALUES: Final = 200_000
"""Maximum number of JSON values in a large body, not counting numbers in lists. Each takes up to 200 bytes parsed."""
MAX_NUMBERS: Final = 2**20
"""Maximum number of numbers in lists (token ids) in a large body. Each takes up to 48 bytes parsed."""
MODEL_VALUES: Final = 50_000
"""Number of values of the largest lists of messages, parts and calls. Further values are counted as plain objects."""
VALUE_BYTES: Final = 600
"""Memory of a value in messages, parts, calls or tools, in bytes, with all copies made while the prompt is built."""
PLAIN_VALUE_BYTES: Final = 200
"""Memory of a value in plain objects, such as JSON schemas, while they are parsed, in bytes."""
KEPT_VALUE_BYTES: Final = 100
"""Memory of a value in plain objects after parsing, in bytes."""
NUMBER_BYTES: Final = 48
"""Memory of a number in a list, in bytes."""
COUNTED_BYTES = 64 * 1024
"""Number of bytes to count per step. Limits the step's memory and time."""
DIGITS_AS_ONES = bytes.maketrans(b"0123456789", b"1" * 10)


class ValueCounter:
    """Counts the values of JSON text as its bytes arrive, in linear time and before any object is created.

    Every value except the first follows a comma, an opening bracket or an opening brace outside of strings. Brackets of
    empty lists and objects do not count. If the text is not valid JSON, a parser fails before it has created more
    objects than were counted. At each boundary of `COUNTED_BYTES`, the count may be off by one.
    """

    def __init__(
        self, whose: str, *, max_values: int = MAX_VALUES, max_numbers: int = MAX_NUMBERS, param: str | None = None
    ) -> None:
        """Start at zero. Error messages begin with `whose`, such as "the body has", and name the field `param`."""
        self._whose, self._param, self._max_values, self._max_numbers = whose, param, max_values, max_numbers
        self._num_values = self._num_numbers = 0
        self._in_string = False
        self._rest = b""  # a trailing backslash whose escaped character has not arrived

    def add(self, data: bytes | bytearray) -> None:
        """Count more of the text. Raises InvalidRequest above the limits."""
        for begin in range(0, len(data), COUNTED_BYTES):
            self._count(self._rest + data[begin : begin + COUNTED_BYTES])
            if self._num_values > self._max_values:
                what = f"{self._max_values:,} JSON values, not counting numbers in lists"
                raise InvalidRequest(f"{self._whose} more than {what}", param=self._param)
            if self._num_numbers > self._max_numbers:
                what = f"{self._max_numbers:,} numbers in lists"
                raise InvalidRequest(f"{self._whose} more than {what}", param=self._param)

    @property
    def object_bytes(self) -> int:
        """Upper bound on the memory of the objects that the text so far parses to, in bytes."""
        num_model_values = min(self._num_values, MODEL_VALUES)
        num_plain_values = self._num_values - num_model_values
        return VALUE_BYTES * num_model_values + PLAIN_VALUE_BYTES * num_plain_values + NUMBER_BYTES * self._num_numbers

    @property
    def kept_bytes(self) -> int:
        """Memory of the parsed objects, in bytes, if most of them are plain."""
        return KEPT_VALUE_BYTES * self._num_values + NUMBER_BYTES * self._num_numbers

    def add_text(self, text: str) -> None:
        """Count another complete JSON text. Raises InvalidRequest above the limits."""
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
