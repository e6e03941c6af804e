"""The engines of a comparison: variants of Diptych and of its peers, ready to be launched."""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.diptych import DiptychVariant
from benchmarks.compare.diptych_vllm import DiptychVllm, DiptychVllm1P1D
from benchmarks.compare.llama_cpp import LlamaCpp, quantise_file
from benchmarks.compare.openvino import OpenVino
from benchmarks.compare.peer import Launch, Peer, Site
from benchmarks.compare.transformers import Transformers
from benchmarks.compare.vllm import Vllm, Vllm1P1D
from common.model_files.files import ModelFiles
from common.model_files.model_cache import cache_folder

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (Vllm(), Vllm1P1D(), DiptychVllm(), DiptychVllm1P1D(), OpenVino(), LlamaCpp(), Transformers())
}
DEFAULT_VARIANT = "bf16=--dtype bfloat16 --quantization none"


@dataclass(frozen=True)
class Engine:
    """A variant of Diptych or of a peer: how to launch it on given ports, and its settings for the reader."""

    name: str
    launch: Callable[[Sequence[int]], Launch]
    about: dict[str, Any]
    is_own: bool = False


def own_engines(options: Namespace, files: ModelFiles, context: int, most: int) -> list[Engine]:
    """Return an engine for each named variant of Diptych; the default one if no peer is Diptych. Raises ValueError."""
    has_own = any(choose_variant(name)[0].is_own for name in options.peer)
    texts = options.diptych or ([] if has_own else [DEFAULT_VARIANT])
    variants = [DiptychVariant.parse(text, options.diptych_args) for text in texts]
    return [
        Engine(
            f"diptych:{variant.name}",
            functools.partial(variant.launch, options.model, context, most),
            {"flags": list(variant.flags), "environment": dict(variant.env), "model_id": files.model_id},
            is_own=True,
        )
        for variant in variants
    ]


def peer_engines(
    names: Sequence[str], environments: Mapping[str, Path], files: ModelFiles, context: int, most: int
) -> list[Engine]:
    """One engine for each name of `choose_variant`; writes the model in the formats they need. Raises ValueError and
    PeerError."""
    wanted = [(name, *choose_variant(name)) for name in names]
    versions = {peer.name: peer.version(environments[peer.name]) for _, peer, _ in wanted}
    from benchmarks.compare.weights import convert  # torch takes seconds to import

    weights = convert(files, [peer.variants[variant] for _, peer, variant in wanted], mixer(environments))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    engines = []
    for _, peer, variant in wanted:
        site = Site(environments[peer.name], weights, cores, context, most)
        about = {"version": versions[peer.name], "format": peer.variants[variant]}
        name = f"{peer.name}:{variant}"
        engines.append(Engine(name, functools.partial(peer.launch, variant, site), about, peer.is_own))
    return engines


def mixer(environments: Mapping[str, Path]) -> Callable[[Path, Path, str], None] | None:
    """What writes mixes of K-quants, if llama.cpp has an environment."""
    env = environments.get(LlamaCpp.name)
    return None if env is None else functools.partial(quantise_file, env)


def choose_variant(text: str) -> tuple[Peer, str]:
    """`vllm` (its first variant) or `vllm:int8`. Raises ValueError."""
    name, _, variant = text.partition(":")
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}; known are {', '.join(PEERS)}")
    peer = PEERS[name]
    variant = variant or next(iter(peer.variants))
    if variant not in peer.variants:
        raise ValueError(f"{name} has no variant {variant!r}; it has {', '.join(peer.variants)}")
    return peer, variant


def peer_environments(given: Sequence[str], peers: Sequence[Peer]) -> dict[str, Path]:
    """The folder of each peer: `NAME=FOLDER`, a bare folder for the only peer, else a folder of the cache."""
    names = list(dict.fromkeys(peer.name for peer in peers))
    found = {name: cache_folder() / "peers" / "environments" / name for name in names}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals and len(names) == 1:
            name, folder = names[0], text
        if name not in found or not folder:
            raise ValueError(f"{text!r} is not NAME=FOLDER with NAME one of {', '.join(names)}")
        found[name] = Path(folder).absolute()
    return found
