"""Model loading."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.kv import torch_dtype
from common.engine.models.decoder import Decoder
from common.engine.models.deepseek import DeepSeek
from common.engine.models.gemma import Gemma
from common.engine.models.llama import Llama
from common.engine.models.olmo import Olmo
from common.engine.models.tensor_reader import StoredWeights, WeightSource
from common.engine.models.weights import Assembler
from common.engine.weights import GGUFWeights, QuantisedSafetensors, SafetensorsWeights
from common.engine.weights.formats import KVCacheFormat, read_weight_format
from common.errors import ModelError
from common.model_files import ModelConfig, Quantization, TensorFacts, from_gguf, from_hf
from common.model_files.families import DecoderName
from common.model_files.gguf import GGUFFile, rope_factors
from common.observe import ByteProgress, in_bytes
from kernels import has_own_kernels, prepare

if TYPE_CHECKING:
    from common.model_files import ModelFiles

log = logging.getLogger(__name__)
DECODERS: Mapping[DecoderName, type[Decoder]] = {"llama": Llama, "deepseek": DeepSeek, "gemma": Gemma, "olmo": Olmo}
"""Decoder classes by the `decoder` of a family."""


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "none",
    with_head: bool = True,
    batch_invariant: bool = False,
) -> Decoder:
    """Load a model in `dtype`, "float32" or "bfloat16", on `device`. Files of another dtype are converted.

    Without `with_head`, the model returns hidden states instead of logits. With `batch_invariant`, a row's bits do not
    depend on the other rows of its step. `quantization` is a value of `Quantization`.

    Raises ModelError, with the remedy, if a file is missing, damaged or truncated, a tensor is missing or has a wrong
    shape, or the architecture or dtype is not supported.
    """
    kind, place = torch_dtype(dtype), torch_device(device)
    if batch_invariant:
        check_batch_invariant(place)
    config, source = open_model(files)
    wanted = effective_quantization(quantization, source, place)
    if config.extra_layers:
        first = config.num_layers
        log.info(
            "%s: layers %d to %d of the file, if present, predict further tokens (MTP) and are not loaded",
            *(files.model_id, first, first + config.extra_layers - 1),
        )
    assembler = Assembler(config, source, kind, place, wanted, batch_invariant=batch_invariant)
    with reading(files, assembler, source, config):
        weights = assembler.assemble(with_head=with_head)
    log_treated(files, assembler)
    return DECODERS[config.family.decoder](config, weights)


@contextmanager
def reading(files: ModelFiles, assembler: Assembler, source: StoredWeights, config: ModelConfig) -> Iterator[None]:
    """Log the progress of `assembler` in reading the weights of a model with this configuration."""
    total = sum(tensor.num_bytes for tensor in source.stored() if tensor.is_of(config.num_layers))
    place = files.weights[0] if len(files.weights) == 1 else f"{len(files.weights)} files in {files.weights[0].parent}"
    prepare(assembler.device.type)  # compiling kernels may take longer than reading the weights
    log.info("model %s: loading %s of weights from %s", files.model_id, in_bytes(total), place)
    seen: set[str] = set()

    def count(name: str) -> None:
        if name not in seen:
            seen.add(name)
            progress.add(source.stored_bytes(name))

    with ByteProgress("weights", "read", total, log) as progress:
        assembler.on_read = count
        yield
    log.info("model %s: loaded weights in %.1f s", files.model_id, progress.seconds)


def log_treated(files: ModelFiles, assembler: Assembler) -> None:
    """Log how quantised weights were converted."""
    if assembler.source.has_quantised:
        treated = ", ".join(f"{count} {how}" for how, count in sorted(assembler.treated.items()))
        log.info("model %s: quantised weights, matrices: %s", files.model_id, treated)


def effective_quantization(quantization: str, source: WeightSource, place: torch.device) -> Quantization:
    """Resolve a quantization for this file and device. Raises ModelError if it is not supported."""
    wanted = Quantization(quantization).effective(quantised_file=source.has_quantised)
    if place.type != "cpu" and wanted in (Quantization.INT8, Quantization.INT4):
        raise ModelError(f"quantization {quantization!r} is supported only on CPUs: use auto or none on {place}")
    return wanted


def check_batch_invariant(place: torch.device) -> None:
    """Raise ModelError if only plain torch is available, whose products and attention depend on the batch."""
    if not has_own_kernels(place.type):
        wanted = "a C++ compiler or a wheel with kernels" if place.type == "cpu" else "Triton and a C compiler"
        raise ModelError(f"--batch-invariant requires Diptych's kernels on {place}: install {wanted}, or omit it")


def load_score(files: ModelFiles, answers: tuple[int, int] | None = None, device: str = "cpu") -> Tensor:
    """Load the head of a scoring model, float32 [1, hidden_size].

    It is the model's own, or the difference of the head rows of two `answers`. Raises ModelError if it is missing or
    has another shape.
    """
    config, source = open_model(files)
    if answers is None:
        weight = source.read("score.weight")
    elif config.final_softcap:
        raise ModelError(f"{source.label}: scores of models with logit soft-capping are not supported")
    else:
        rows = source.read("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight").float()
        weight = rows[answers[0]][None] - rows[answers[1]][None]
    if tuple(weight.shape) != (1, config.hidden_size):
        raise ModelError(
            f"{source.label}: tensor score.weight is {list(weight.shape)}, must be [1, {config.hidden_size}]"
        )
    return weight.to(device=torch_device(device), dtype=torch.float32)


def open_model(files: ModelFiles) -> tuple[ModelConfig, StoredWeights]:
    """Open a model's files: configuration and weights, not read yet. Raises ModelError like `load_model`."""
    if not files.weights:
        raise ModelError(f"model {files.model_id} has no weights file: download the model again")
    if files.format == "gguf":
        file = GGUFFile(*files.weights)
        facts = TensorFacts.of(file.names, file.shape("token_embd.weight")[0], rope_factors(file.path, file.head))
        config = from_gguf(file.metadata, facts, file.path)
        return config, GGUFWeights(file, config)
    path = files.config or files.weights[0].with_name("config.json")
    config, quantised = from_hf(path), read_weight_format(path)
    source: StoredWeights = (
        SafetensorsWeights(files.weights) if quantised is None else QuantisedSafetensors(files.weights, quantised)
    )
    if config.tie_embeddings is None:
        config = replace(config, tie_embeddings=not source.has("lm_head.weight"))
    return config, source


def kv_form(files: ModelFiles, setting: str, dtype: str) -> KVCacheFormat:
    """Resolve `--kv-cache-dtype` for a model of `dtype`. Raises ModelError like `load_model` and `KVCacheFormat.of`."""
    config, source = open_model(files)
    described = None
    if files.format == "hf":
        described = files.config or files.weights[0].with_name("config.json")
    return KVCacheFormat.of(setting, dtype, source, described, config.num_layers)


def torch_device(name: str) -> torch.device:
    """Return the torch device. Raises ModelError if this torch cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used ({str(error).splitlines()[0]}): use cpu") from error
    return device
