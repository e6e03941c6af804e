"""Workers of several ranks as real processes: this one is rank 0, without engine and router around it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig
from common.errors import ConfigError, ModelError, RankLost
from common.kv.staging import incoming_blocks, outgoing_blocks
from common.model.batch import SequenceChunk
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.ranks.loading import Ranks, load_ranked
from common.runner.loaded import LoadedModel

from ..model.generation import prompt, transformers_greedy, transformers_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny")


@contextmanager
def worker(folder: Path, size: int, **settings: object) -> Iterator[LoadedModel]:
    given = {"model": str(folder), "dtype": "float32", "quantization": "none", "num_blocks": 32, **settings}
    config = DecodeWorkerConfig(**given, tensor_parallel_size=size)
    files = resolve_model(str(folder))
    loaded = load_ranked(files, config) if size > 1 else LoadedModel.load(files, config)
    try:
        yield loaded
    finally:
        if loaded.others is not None:
            loaded.others.close()


def run(loaded: LoadedModel, tokens: Sequence[int], start: int, table: Sequence[int], chunk: int = 16) -> int:
    """Computes `tokens`, which follow `start` others, in chunks; returns the next token."""
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        last = first + len(part) == len(tokens)
        logits = loaded.runner.forward([SequenceChunk(part, start + first, table, last)])
    return int(logits[0].argmax())


def go_on(loaded: LoadedModel, known: Sequence[int], count: int, table: Sequence[int]) -> list[int]:
    """`count` more tokens; the KV of all but the last of `known` is there."""
    tokens = list(known)
    for _ in range(count):
        tokens.append(run(loaded, tokens[-1:], len(tokens) - 1, table))
    return tokens[len(known) :]


def copy_blocks(source: LoadedModel, blocks: Sequence[int], target: LoadedModel, places: Sequence[int]) -> None:
    outgoing, incoming = outgoing_blocks(source.kv), incoming_blocks(target.kv)
    for block, place in zip(blocks, places, strict=True):
        incoming.view(place)[:] = outgoing.view(block)
        incoming.commit([place])


def test_a_worker_of_two_ranks_and_one_of_one_answer_as_one(folder: Path) -> None:
    """P2 -> D1 -> P2: the prompt on two ranks, tokens on one, further tokens on two."""
    tokens = prompt(41)
    expected, _ = transformers_greedy(transformers_model(folder), tokens, 24)
    with worker(folder, 2) as two, worker(folder, 1) as one:
        assert two.fingerprint == one.fingerprint
        here, there, back = (7, 2, 30, 11, 4), (1, 20, 9, 3, 5), (8, 9, 10, 12, 13)
        first = run(two, tokens, 0, here)
        copy_blocks(two, here[:3], one, there[:3])
        on_one = go_on(one, [*tokens, first], 11, there)
        copy_blocks(one, there[:4], two, back[:4])
        on_two = go_on(two, [*tokens, first, *on_one], 12, back)
        assert [first, *on_one, *on_two] == expected
        assert two.others is not None
        assert not two.others.failure
