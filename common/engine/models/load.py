"""Loads a model from its files."""

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
from common.engine.weights.formats import KVForm, read_weight_format
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
"""Forward passes by the `decoder` of a family."""


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "none",
    with_head: bool = True,
    batch_invariant: bool = False,
) -> Decoder:
    """Loads a model in `dtype`, "float32" or "bfloat16", on `device`; converts files of another dtype.

    Without `with_head` it gives hidden states in place of logits. `batch_invariant`: a row's bits do not depend on what
    else is in its step.

    `quantization` is one of `Quantization`. ModelError, with the remedy, when a file is missing, damaged or truncated,
    a tensor is missing or has a wrong shape, or architecture or dtype are not supported.
    """
    kind, place = torch_dtype(dtype), torch_device(device)
    if batch_invariant:
        check_batch_invariant(place)
    config, source = open_model(files)
    wanted = effective_quantization(quantization, source, place)
    if config.extra_layers:
        first = config.num_layers
        log.info(
            "%s: layers %d to %d of the file, if it has them, predict further tokens (MTP) and are not read",
            *(files.model_id, first, first + config.extra_layers - 1),
        )
    assembler = Assembler(config, source, kind, place, wanted, batch_invariant=batch_invariant)
    with reading(files, assembler, source, config):
        weights = assembler.assemble(with_head=with_head)
    log_treated(files, assembler)
    return DECODERS[config.family.decoder](config, weights)


@contextmanager
def reading(files: ModelFiles, assembler: Assembler, source: StoredWeights, config: ModelConfig) -> Iterator[None]:
    """Shows how far `assembler` is with the weights that a model of that configuration has in its files."""
    total = sum(tensor.num_bytes for tensor in source.stored() if tensor.is_of(config.num_layers))
    place = files.weights[0] if len(files.weights) == 1 else f"{len(files.weights)} files in {files.weights[0].parent}"
    prepare(assembler.device.type)  # to compile them may take longer than to read the weights
    log.info("reads the weights of %s, %s, from %s", files.model_id, in_bytes(total), place)
    seen: set[str] = set()

    def count(name: str) -> None:
        if name not in seen:
            seen.add(name)
            progress.add(source.stored_bytes(name))

    with ByteProgress("weights", "read", total, log) as progress:
        assembler.on_read = count
        yield
    log.info("has read the weights of %s in %.1f s", files.model_id, progress.seconds)


def log_treated(files: ModelFiles, assembler: Assembler) -> None:
    """Says what has become of quantised weights."""
    if assembler.source.has_quantised:
        treated = ", ".join(f"{count} are {how}" for how, count in sorted(assembler.treated.items()))
        log.info("%s holds quantised weights; of its matrices %s", files.model_id, treated)


def effective_quantization(quantization: str, source: WeightSource, place: torch.device) -> Quantization:
    """What it means there. ModelError where it cannot be had."""
    wanted = Quantization(quantization).effective(quantised_file=source.has_quantised)
    if place.type != "cpu" and wanted in (Quantization.INT8, Quantization.INT4):
        raise ModelError(f"quantization {quantization!r} runs on the CPU only: use auto or none on {place}")
    return wanted


def check_batch_invariant(place: torch.device) -> None:
    """ModelError where only plain torch computes: its products and its attention depend on the batch."""
    if not has_own_kernels(place.type):
        wanted = "a C++ compiler or a wheel with kernels" if place.type == "cpu" else "Triton and a C compiler"
        raise ModelError(f"--batch-invariant needs kernels of our own on {place}: install {wanted}, or leave it out")


def load_score(files: ModelFiles, answers: tuple[int, int] | None = None, device: str = "cpu") -> Tensor:
    """The head of a model that scores, float32 [1, hidden_size]: its own, or the difference of those of two `answers`.

    ModelError when it is missing or of another shape.
    """
    config, source = open_model(files)
    if answers is None:
        weight = source.read("score.weight")
    elif config.final_softcap:
        raise ModelError(f"{source.label}: capped logits are not supported for scores: use a model without a softcap")
    else:
        rows = source.read("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight").float()
        weight = rows[answers[0]][None] - rows[answers[1]][None]
    if tuple(weight.shape) != (1, config.hidden_size):
        raise ModelError(
            f"{source.label}: tensor score.weight is {list(weight.shape)}, a score is made by [1, {config.hidden_size}]"
        )
    return weight.to(device=torch_device(device), dtype=torch.float32)


def open_model(files: ModelFiles) -> tuple[ModelConfig, StoredWeights]:
    """Configuration and still unread weights of a model's files. ModelError as `load_model`."""
    if not files.weights:
        raise ModelError(f"model {files.model_id} has no weights file: fetch the model again")
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


def kv_form(files: ModelFiles, setting: str, dtype: str) -> KVForm:
    """What `--kv-cache-dtype` means for a model of `dtype`. ModelError as `load_model`, and as `KVForm.of`."""
    config, source = open_model(files)
    described = None
    if files.format == "hf":
        described = files.config or files.weights[0].with_name("config.json")
    return KVForm.of(setting, dtype, source, described, config.num_layers)


def torch_device(name: str) -> torch.device:
    """The device of that name. ModelError when this torch cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used ({str(error).splitlines()[0]}): use cpu") from error
    return device
