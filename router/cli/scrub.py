"""Removes secrets and names of machines and users from text for a bug report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

HIDDEN: Final = "***"
MIN_SECRET: Final = 4
"""Shorter values are too common to be removed wherever they occur."""
SECRET_NAME: Final = re.compile(r"(?i)(^|_)(api_?key|token|secret|password|passwd|credentials?|auth\w*)(_|$)")
Z85: Final = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]"
PATTERNS: Final = (
    (
        re.compile(r"(?i)((?:authorization|x-api-key)[\"']?\s*[:=]\s*[\"']?)(?:(?:bearer|basic)\s+)?[^\s\"',]+"),
        r"\1***",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',]{4,}"), r"\1 ***"),
    (re.compile(r"\b(hf_|sk-|ghp_|gho_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{6,}"), r"\1***"),
    (re.compile(r"(\w+://)[^/\s@\"']+@"), r"\1***@"),
    (re.compile(r"(?i)([?&](?:\w*key|\w*token|sig|signature|secret|password)=)[^&\s\"']+"), r"\1***"),
    (
        re.compile(
            r"(?i)(\b[\w-]*(?:api[_-]?key|secret(?:[_-]?key)?|password|passwd|[_-]token)\"?'?\s*[=:]\s*[\"']?)[^\s\"',;]+"
        ),
        r"\1***",
    ),
    (re.compile(rf"([\"']){Z85}{{40}}([\"'])"), r"\1***\2"),  # CURVE keys
    (re.compile(r"-----BEGIN [^-]*-----.*?-----END [^-]*-----", re.DOTALL), HIDDEN),
    (re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"), "IP"),
    (re.compile(r"(?i)(?<![\w:.])(?!::1\b)(?:[0-9a-f]{1,4}:){2,7}:?[0-9a-f]{1,4}(?![\w:])"), "IP"),
)


def secrets_in(environ: Mapping[str, str], files: Iterable[str] = ()) -> set[str]:
    """Return the values of variables whose names suggest a secret, and the quoted values in key files."""
    found = {value for name, value in environ.items() if SECRET_NAME.search(name)}
    for file in filter(None, files):
        try:
            found |= set(re.findall(r"[\"']([^\"'\n]+)[\"']", Path(file).expanduser().read_text(errors="replace")))
        except OSError:
            continue
    return {one for one in found if len(one) >= MIN_SECRET}


class Scrubber:
    """Replaces known secrets, anything that looks like one, and names. The same name always gets the same number."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)
        self._names: dict[str, str] = {}
        home = os.path.expanduser("~")
        if len(home) > 1:
            self._names[home] = "~"

    def add(self, secrets: Iterable[str]) -> None:
        """Replace more secrets."""
        self._secrets = sorted({*self._secrets, *secrets}, key=len, reverse=True)

    def hide(self, kind: str, names: Iterable[str]) -> None:
        """Replace each of `names` by `kind` and a number."""
        for name in names:
            if len(name) > 1 and name not in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
                self._names.setdefault(name, f"{kind}-{len(self._names) + 1}")

    def text(self, text: str) -> str:
        """Return the text without secrets and names."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern, replacement in PATTERNS[:-2]:
            text = pattern.sub(replacement, text)
        for name in sorted(self._names, key=len, reverse=True):
            text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", self._names[name], text)
        for pattern, replacement in PATTERNS[-2:]:
            text = pattern.sub(replacement, text)
        return text
