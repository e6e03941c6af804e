"""Registry of tool-call formats, with one entry per variant."""

from __future__ import annotations

import re

from router.text.calls.deepseek import DeepSeekFormat
from router.text.calls.format import CallFormat
from router.text.calls.glm import GLMFormat
from router.text.calls.harmony import HarmonyFormat
from router.text.calls.hermes import HermesFormat
from router.text.calls.kimi import KimiFormat
from router.text.calls.llama3 import Llama3Format
from router.text.calls.minimax import MiniMaxFormat
from router.text.calls.mistral import MistralFormat
from router.text.calls.pythonic import PythonicFormat
from router.text.calls.qwen_coder import QwenCoderFormat
from router.text.calls.seed_oss import SeedOSSFormat

FORMATS: tuple[CallFormat, ...] = (
    HarmonyFormat(),
    DeepSeekFormat(fenced=True),
    DeepSeekFormat(),
    MistralFormat(compact=True),
    MistralFormat(),
    KimiFormat(),
    SeedOSSFormat(),
    QwenCoderFormat(),
    GLMFormat(),
    MiniMaxFormat(),
    HermesFormat(),
    PythonicFormat(tagged=True),
    PythonicFormat(),
    Llama3Format(),
)
"""In detection order: a format precedes those whose pattern also matches its rendered calls.

`--tool-parser` selects the last of several variants with the same name.
"""


def format_named(name: str) -> CallFormat:
    """Return the format with this name. Raises LookupError if it does not exist."""
    found = {each.name: each for each in FORMATS}
    return found[name]


def format_in(rendered: str) -> CallFormat | None:
    """Detect the format of a rendered call. Returns None if the call or its arguments are in no known format."""
    if not any(re.search(each.rendered_argument, rendered) for each in FORMATS):
        return None
    return next((each for each in FORMATS if re.search(each.rendered_call, rendered)), None)
