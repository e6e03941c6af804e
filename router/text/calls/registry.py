"""Registry of tool-call formats, with one entry per variant."""

from __future__ import annotations

import re
from collections.abc import Mapping

from router.text.calls.command import CommandFormat
from router.text.calls.deepseek import DeepSeekFormat
from router.text.calls.deepseek_v32 import DeepSeekV4Format, DeepSeekV32Format
from router.text.calls.format import CallFormat
from router.text.calls.gemma import FunctionGemmaFormat, GemmaFormat
from router.text.calls.glm import GLMFormat
from router.text.calls.glm4 import GLM4Format
from router.text.calls.granite import GraniteFormat
from router.text.calls.harmony import HarmonyFormat
from router.text.calls.hermes import HermesFormat
from router.text.calls.internlm import InternLMFormat
from router.text.calls.kimi import KimiFormat
from router.text.calls.lfm2 import LFM2Format
from router.text.calls.llama3 import Llama3Format
from router.text.calls.minimax import MiniMaxFormat
from router.text.calls.mistral import MistralFormat
from router.text.calls.olmo import OlmoFormat
from router.text.calls.phi4_mini import Phi4MiniFormat
from router.text.calls.pythonic import PythonicFormat
from router.text.calls.qwen_coder import QwenCoderFormat
from router.text.calls.seed_oss import SeedOSSFormat
from router.text.calls.solar import SolarFormat
from router.text.calls.xlam import XLAMFormat

FORMATS: tuple[CallFormat, ...] = (
    HarmonyFormat(),
    DeepSeekV32Format(),
    DeepSeekV4Format(),
    DeepSeekFormat(fenced=True),
    DeepSeekFormat(),
    MistralFormat(compact=True),
    MistralFormat(),
    KimiFormat(),
    SolarFormat(),
    SeedOSSFormat(),
    QwenCoderFormat(),
    GLMFormat(),
    MiniMaxFormat(),
    GemmaFormat(),
    FunctionGemmaFormat(),
    HermesFormat(),
    Phi4MiniFormat(functools=True),
    Phi4MiniFormat(),
    GraniteFormat(),
    CommandFormat(fenced=True),
    CommandFormat(),
    InternLMFormat(),
    OlmoFormat(),
    LFM2Format(),
    PythonicFormat(),
    GLM4Format(),
    XLAMFormat(),
    Llama3Format(),
)
"""In detection order: a format precedes those whose pattern also matches its rendered calls.

`--tool-parser` selects the last of several variants with the same name.
"""
FAMILIES: Mapping[str, str] = {"ernie": "hermes", "exaone": "hermes", "granite4": "hermes", "qwen3": "hermes"}
"""Names of families for `--tool-parser` that share the format of another one."""


def format_named(name: str) -> CallFormat:
    """Return the format with this name, or of this family. Raises LookupError if it does not exist."""
    found = {each.name: each for each in FORMATS}
    return found[FAMILIES.get(name, name)]


def format_in(rendered: str) -> CallFormat | None:
    """Detect the format of a rendered call. Returns None if the call or its arguments are in no known format."""
    return next(
        (
            each
            for each in FORMATS
            if re.search(each.rendered_call, rendered) and re.search(each.rendered_argument, rendered)
        ),
        None,
    )


def format_hinted(source: str) -> CallFormat | None:
    """Detect the format whose delimiters are part of the text of a chat template that does not render calls."""
    return next((each for each in FORMATS if any(hint in source for hint in each.hints)), None)
