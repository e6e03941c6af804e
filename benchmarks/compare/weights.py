"""One model in the formats that engines read, all made from the same values and kept in the cache.

`gguf` is the model's own file. The others are its dequantised values written again: as a Hugging Face folder in
bfloat16, as one with int8 matrices (compressed-tensors: a scale a row, activations quantised a token), as GGUF files
of another type, or, from those in bfloat16, as mixes of K-quants by llama.cpp's own tool. The folders name no end
token, so that an engine which cannot ignore it generates full lengths too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compare.peer import PeerError
from common.engine.models.load import open_model
from common.model_files.config import ModelConfig
from common.model_files.files import ModelFiles
from common.model_files.gguf.tensors import GGUFFile
from common.model_files.model_cache import cache_folder, locked

GGUF_TYPES = {
    "gguf-bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "gguf-f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "gguf-q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "gguf-q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "gguf-mxfp4": (GGMLQuantizationType.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}
GGUF_MIXES = {"gguf-q4_k_m": "Q4_K_M", "gguf-q5_k_m": "Q5_K_M", "gguf-q6_k": "Q6_K"}
"""Formats that `llama-quantize` writes, and its names for them. Rows that 256 does not divide get other types there."""
FORMATS = ("gguf", "hf", "hf-w8a8", *GGUF_TYPES, *GGUF_MIXES)
FOUR_BITS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.MXFP4)
EMBEDDING = "token_embd.weight"
MATRICES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
NORMS = ("input_layernorm", "post_attention_layernorm")
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


Mixer = Callable[[Path, Path, str], None]
"""Writes a GGUF file of floats again, as the mix that `llama-quantize` calls so."""


def convert(files: ModelFiles, formats: Iterable[str], mix: Mixer | None = None) -> dict[str, Path]:
    """The model in each of these FORMATS, written unless it exists; GGUF_MIXES by `mix`. Raises PeerError for a GGUF
    format of a model that is no GGUF file, and for a mix without llama.cpp."""
    return {name: _converted(files, name, folder_of(files), mix) for name in dict.fromkeys(formats)}


def folder_of(files: ModelFiles) -> Path:
    """The folder of the cache for all formats of this model."""
    return cache_folder() / "peers" / f"{files.model_id}-{files.weights_hash}"


def _converted(files: ModelFiles, name: str, folder: Path, mix: Mixer | None) -> Path:
    source = files.weights[0]
    if name.startswith("gguf") and files.format != "gguf":
        raise PeerError(f"{files.model_id} is no GGUF file, and a peer needs one")
    if name == "gguf":
        return source
    if name in GGUF_MIXES:
        return _mixed(files, name, folder, mix)
    path = folder / (f"{name}.gguf" if name in GGUF_TYPES else name)
    with written_once(path) as unfinished:
        if unfinished is not None and name in GGUF_TYPES:
            write_gguf(source, unfinished, *GGUF_TYPES[name])
        elif unfinished is not None:
            write_folder(files, unfinished, int8=name == "hf-w8a8")
    return path


def _mixed(files: ModelFiles, name: str, folder: Path, mix: Mixer | None) -> Path:
    if mix is None:
        raise PeerError(f"llama.cpp's own tool writes {name}, and no folder of llama.cpp is named")
    floats, path = _converted(files, "gguf-bf16", folder, mix), folder / f"{name}.gguf"
    with written_once(path) as unfinished:
        if unfinished is not None:
            mix(floats, unfinished, GGUF_MIXES[name])
    return path


@contextmanager
def written_once(path: Path) -> Iterator[Path | None]:
    """The place to write `path` at, which it is moved from when the block ends; None if `path` is there already."""
    with locked(path.parent / ".lock"):
        if path.exists():
            yield None
            return
        unfinished = path.with_name(f".{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        yield unfinished
        unfinished.rename(path)


def write_gguf(source: Path, path: Path, kind: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    """Copy a GGUF file with its matrices as `kind`. A file of 4 bits keeps the token embedding (often the LM head too)
    of its source, as llama.cpp's own tool keeps it finer than the rest."""
    reader, values = GGUFReader(source), GGUFFile(source)
    writer = begin_copy(reader, path, file_type)
    for tensor in reader.tensors:
        kept = kind in FOUR_BITS and tensor.name == EMBEDDING
        if len(tensor.shape) < 2 or kept:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, quantize(values.read(tensor.name), kind), raw_dtype=kind)
    end_copy(writer)


def begin_copy(
    reader: GGUFReader, path: Path, file_type: LlamaFileType, changed: Mapping[str, Any] | None = None
) -> GGUFWriter:
    """Begin a GGUF file with the metadata of another, of which those in `changed` get other values."""
    architecture, replaced = str(reader.fields["general.architecture"].contents()), changed or {}
    writer = GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            array = field.types[0] == GGUFValueType.ARRAY
            value = replaced.get(field.name, field.contents())
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if array else None)
    writer.add_file_type(file_type)
    return writer


def end_copy(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(files: ModelFiles, folder: Path, *, int8: bool) -> None:
    """A Hugging Face folder of a Llama model. Raises PeerError for any other."""
    config, source = open_model(files)
    if config.model_type != "llama":
        raise PeerError(f"{files.model_id} is a {config.model_type} model; folders are written for llama models")
    folder.mkdir(parents=True)
    save_file(dict(tensors(config, source.read, int8=int8)), folder / "model.safetensors", {"format": "pt"})
    described = hf_config(config) | ({"quantization_config": W8A8} if int8 else {})
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}) + "\n")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_model_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer) + "\n")
    shutil.copyfile(files.tokenizer, folder / "tokenizer.json")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.layer_ropes[0].theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def tensors(config: ModelConfig, read: Callable[[str], Tensor], *, int8: bool) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a Llama model by Hugging Face's name, in bfloat16; matrices of layers as int8 and scales."""
    top = ("model.embed_tokens", "model.norm", *(() if config.tie_embeddings else ("lm_head",)))
    for part in top:
        yield f"{part}.weight", read(f"{part}.weight").to(torch.bfloat16)
    for index in range(config.num_layers):
        for part in NORMS:
            name = f"model.layers.{index}.{part}.weight"
            yield name, read(name).to(torch.bfloat16)
        for part in MATRICES:
            name = f"model.layers.{index}.{part}.weight"
            weight = read(name)
            if int8:
                numbers, scales = quantise_rows(weight)
                yield name, numbers
                yield f"{name}_scale", scales
            else:
                yield name, weight.to(torch.bfloat16).contiguous()


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and bfloat16 scales [rows, 1] of a float matrix, symmetric, a scale a row."""
    largest = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8)
    scales = (largest / 127).to(torch.bfloat16)
    numbers = (weight.float() / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return numbers.contiguous(), scales
