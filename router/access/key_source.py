"""Where the keys of a router come from, and how its processes go by the same content of their file."""

from __future__ import annotations

from common.config import RouterConfig
from router.access.key_file import content_of, ring_of
from router.access.keys import KeyRing
from router.access.watch import FileWatch
from router.siblings import AgreedFile, RouterPart

NAME = "keys.toml"


class KeySource:
    """`ring` is in force from the start. Every method reads files. Raises ConfigError.

        the file ── two equal looks ──> one process accepts it ── agreed copy ──> the others, at their next look

    A process that is started again goes by the copy, also where the file has changed into something that all refuse.
    """

    def __init__(self, config: RouterConfig, part: RouterPart | None = None) -> None:
        self._config, self._path = config, config.api_key_file
        self._agreed = AgreedFile(part, NAME) if part is not None and self._path else None
        self._changed, self._refused = False, b""
        content = self._agreed.read() if self._agreed is not None else None
        if self._path:  # the watch begins before the file is read, so that it misses no change
            self.watch: FileWatch | None = FileWatch([self._path], known=content)
            self._content = content_of(self._path) if content is None else content
        else:
            self.watch, self._content = None, b""
        self.ring: KeyRing | None = self._ring_of(self._content)
        self._accept()

    def look(self) -> bool:
        """Whether there is something new to `read`: in the file, or because another process accepted it."""
        if self.watch is None:
            return False
        self._changed = self.watch.look()
        return self._changed or self._other() is not None

    def read(self) -> KeyRing | None:
        """The keys from now on: those of the file, if it has changed, else what another process accepted."""
        content = None if self._changed else self._other()
        if content is None:
            content = content_of(self._path)
        try:
            self.ring = self._ring_of(content)
        except Exception:
            self._refused = content
            raise
        self._content = content
        self._accept()
        return self.ring

    # ------------------------------------------------------------ inside

    def _ring_of(self, content: bytes) -> KeyRing | None:
        config = self._config
        return ring_of(self._path, config.api_key, config.classes, content)

    def _other(self) -> bytes | None:
        """What another process accepted and this one has not read; None if there is nothing."""
        agreed = self._agreed.read() if self._agreed is not None else None
        return None if agreed in (self._content, self._refused) else agreed

    def _accept(self) -> None:
        """Put the content that was read last in force."""
        if self._agreed is not None and self._agreed.read() != self._content:
            self._agreed.agree(self._content)
