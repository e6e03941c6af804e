"""Diptych itself: `diptych serve`, one prefill and one decode worker over the real wire, every prompt disaggregated.

Random prompts make answers that repeat themselves, so speculative decoding is off unless a variant turns it on.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare.peer import HOST, Launch, Process, url

ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")


@dataclass(frozen=True)
class DiptychVariant:
    """A named way to run Diptych: flags of `diptych serve`, and variables for its environment."""

    name: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, more: str = "") -> DiptychVariant:
        """`int8=VARIABLE=value --quantization int8`: a name, then words as a shell reads them. Raises ValueError.

        `more` is appended to the words of the variant.
        """
        name, equals, words = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"{text!r} is not NAME=ARGUMENTS")
        env: list[tuple[str, str]] = []
        flags: list[str] = []
        for word in (*shlex.split(words), *shlex.split(more)):
            if not flags and (found := ASSIGNMENT.fullmatch(word)):
                env.append((found[1], found[2]))
            else:
                flags.append(word)
        return cls(name, tuple(flags), tuple(env))

    def launch(self, model: str, max_model_len: int, max_num_seqs: int, ports: Sequence[int]) -> Launch:
        argv = (
            *(sys.executable, "-P", "-m", "common.cli", "serve"),
            *("--model", model, "--host", HOST, "--port", str(ports[0])),
            *("--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)),
            *("--no-enable-prefix-caching", "--local-prefill-threshold", "0", "--max-draft-tokens", "0"),
            *self.flags,
        )
        process = Process(f"diptych-{self.name}", argv, url(ports[0], "/ready"), dict(self.env))
        return Launch(url(ports[0]), (process,))
