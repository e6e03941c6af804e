"""A terminal as a page that is written over and over, and gives the terminal back as it was.

with Screen(...) as screen:   # another buffer, no cursor, keys at once
    screen.draw(lines)        # one write a frame: nothing flickers
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

from router.top.picture import Line

OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
LONGEST_KEYS = 64
"""Bytes read at a time: keys that were pressed in a row."""
QUIT = b"qQ\x03\x04"


class Ended(Exception):
    """The process is to end: a signal."""


class Screen:
    """The terminal of `out`, with the keys of `keys` where that is a terminal too."""

    def __init__(self, out: TextIO = sys.stdout, keys: TextIO | None = None, *, styled: bool = True) -> None:
        self._out, self._styled = out, styled
        keys = sys.stdin if keys is None else keys
        self._keys = keys.fileno() if keys is not None and keys.isatty() else None
        self._before: Any = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the first is ignored in a script's background
            self._handlers[number] = signal.signal(number, _end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # it would keep the buffer
        self._write(OPEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(CLOSE)
            if self._keys is not None:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines, now."""
        return shutil.get_terminal_size((80, 24))

    def draw(self, lines: Sequence[Line]) -> None:
        """Show the first lines that fit."""
        columns, rows = self.size
        shown = (line.shown(columns, styled=self._styled) + TO_LINE_END for line in lines[:rows])
        self._write(HOME + "\r\n".join(shown) + TO_SCREEN_END)

    def wait(self, wake: int, seconds: float) -> bool:
        """Wait so long at most, or until the file descriptor `wake` has something to read. False: end."""
        watched = [wake] if self._keys is None else [wake, self._keys]
        ready, _, _ = select.select(watched, [], [], seconds)
        if wake in ready:
            os.read(wake, LONGEST_KEYS)
        if self._keys not in ready or self._keys is None:
            return True
        pressed = os.read(self._keys, LONGEST_KEYS)
        return bool(pressed) and not any(key in QUIT for key in pressed)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended
