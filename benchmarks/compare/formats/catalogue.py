"""The formats of weights that Diptych serves on a CPU, and the peers that each is measured beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

EIGHT_BITS: Final = ("llama.cpp:int8", "openvino:int8")
FOUR_BITS: Final = ("llama.cpp:q4_0", "openvino:q4_1")


@dataclass(frozen=True, slots=True)
class Format:
    """`source` is a format of `weights`, or a layout of `checkpoints`; `peers` are the nearest of each engine.

    `quantization` is how Diptych is told to read it.
    """

    name: str
    about: str
    source: str
    peers: tuple[str, ...]
    quantization: str = "auto"


FORMATS: Final = {
    one.name: one
    for one in (
        Format("bf16", "bfloat16", "gguf-bf16", (), "none"),
        Format("fp8-tensor", "fp8, tensor", "fp8 by tensor", EIGHT_BITS),
        Format("fp8-channel", "fp8, channel", "fp8 by channel", EIGHT_BITS),
        Format("fp8-block", "fp8, block 128", "fp8 by block of 128", EIGHT_BITS),
        Format("w8a8", "W8A8", "W8A8 by channel", EIGHT_BITS),
        Format("w4a16", "W4A16", "W4A16, groups of 64", FOUR_BITS),
        Format("awq", "AWQ int4", "AWQ int4, groups of 64", FOUR_BITS),
        Format("gptq", "GPTQ int4", "GPTQ int4, groups of 64", FOUR_BITS),
        Format("q4_0", "Q4_0", "gguf-q4_0", FOUR_BITS),
        Format("q4_1", "Q4_1", "gguf", FOUR_BITS),
        Format("q8_0", "Q8_0", "gguf-q8_0", EIGHT_BITS),
        Format("q4_k_m", "Q4_K_M", "gguf-q4_k_m", ("llama.cpp:q4_k_m", "openvino:q4_1")),
        Format("q5_k_m", "Q5_K_M", "gguf-q5_k_m", ("llama.cpp:q5_k_m", "openvino:q4_1")),
        Format("q6_k", "Q6_K", "gguf-q6_k", ("llama.cpp:q6_k", "openvino:int8")),
        Format("mxfp4", "MXFP4", "gguf-mxfp4", FOUR_BITS),
    )
}


def choose(names: str) -> list[Format]:
    """The formats of names separated by commas, each once. Raises ValueError."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in FORMATS]
    if unknown or not wanted:
        raise ValueError(f"--formats {names!r}: {unknown or 'none'} named; known are {', '.join(FORMATS)}")
    return [FORMATS[name] for name in wanted]


def nearest(formats: Iterable[Format], engines: Sequence[str]) -> list[str]:
    """The peers of these formats, each once, of these engines alone, in the order of `engines`."""
    peers = list(dict.fromkeys(peer for one in formats for peer in one.peers))
    return [peer for engine in engines for peer in peers if peer.partition(":")[0] == engine]
