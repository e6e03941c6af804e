"""Workers of several ranks as real processes: this one is rank 0, without engine and router around it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from common.config import DecodeWorkerConfig
from common.engine.kv.staging import incoming_blocks, outgoing_blocks
from common.engine.models.batch import SequenceChunk
from common.engine.ranks import group, loading, processes
from common.engine.ranks.adapters import AllPlaces
from common.engine.ranks.liveness import HEARTBEAT_S
from common.engine.ranks.loading import load_ranked, plans
from common.engine.ranks.processes import RankPlan
from common.engine.ranks.steps import RankedGraphRunner
from common.engine.run.loaded import LoadedModel
from common.errors import BlockError, ConfigError, ModelError, RankLost
from common.model_files.resolve import resolve_model
from common.model_files.tiny import FFN, make_tiny_model
from kernels import NO_ADAPTER

from ....adapters import make_adapter, merge
from ....rank_rig import rank_of, recording_worker, worker
from ..models.generation import prompt, transformers_greedy, transformers_model

pytestmark = pytest.mark.e2e

MakeWorker = Callable[..., AbstractContextManager[LoadedModel]]
WIDE = 131_072
MEBI = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny")


def run(
    loaded: LoadedModel,
    tokens: Sequence[int],
    start: int,
    table: Sequence[int],
    chunk: int = 16,
    adapter: int = NO_ADAPTER,
) -> int:
    """Computes `tokens`, which follow `start` others, in chunks; returns the next token."""
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        last = first + len(part) == len(tokens)
        logits = loaded.runner.forward([SequenceChunk(part, start + first, table, last, adapter=adapter)])
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


@pytest.mark.slow
@pytest.mark.parametrize("two_ranks", [worker, recording_worker])
def test_a_worker_of_two_ranks_and_one_of_one_answer_as_one(
    folder: Path, two_ranks: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2 -> D1 -> P2: the prompt on two ranks, tokens on one, further tokens on two.

    No step has a barrier, which on GPUs makes the host wait for all steps before.
    """
    monkeypatch.setattr(group.dist, "barrier", broken)
    tokens = prompt(41)
    expected, _ = transformers_greedy(transformers_model(folder), tokens, 24)
    with two_ranks(folder, 2) as two, worker(folder, 1) as one:
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


@pytest.mark.slow
@pytest.mark.parametrize("two_ranks", [worker, recording_worker])
def test_an_adapter_is_put_into_all_ranks(folder: Path, tmp_path: Path, two_ranks: MakeWorker) -> None:
    paths = [make_adapter(tmp_path / f"{seed}", folder, seed=seed, rank=4) for seed in (1, 2)]
    merged = [merge(tmp_path / f"merged-{path.name}", folder, path) for path in paths]
    tokens, table = prompt(41), (7, 2, 30, 11)
    expected = [transformers_greedy(transformers_model(one), tokens, 12)[0] for one in (*merged, folder)]
    with two_ranks(folder, 2, max_loras=2, max_num_seqs=2) as loaded:
        assert loaded.adapters is not None
        places = [loaded.adapters.load(path.name, str(path)).place for path in paths]
        for place, wanted in zip((*places, NO_ADAPTER), expected, strict=True):
            found = [run(loaded, tokens, 0, table, adapter=place)]
            while len(found) < len(wanted):
                found.append(run(loaded, found[-1:], len(tokens) + len(found) - 1, table, adapter=place))
            assert found == wanted


@pytest.mark.slow
def test_a_rank_that_reads_another_adapter_is_an_error_and_the_place_stays_free(folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", folder, rank=4)
    with worker(folder, 2, max_loras=1) as loaded:
        bank = loaded.adapters
        assert bank is not None and isinstance(bank._places, AllPlaces)
        read = bank._places.read
        bank._places.read = lambda path: dataclasses.replace(read(path), digest="other")  # type: ignore[method-assign]
        with pytest.raises(
            ModelError, match=r"rank 1: .* differs from the file that rank 0 has read: load the adapter again"
        ):
            bank.load("a", str(path))
        bank._places.read = read  # type: ignore[method-assign]
        assert bank.load("a", str(path)).place == 0


@pytest.mark.slow
def test_a_killed_rank_ends_the_worker(folder: Path) -> None:
    with worker(folder, 2) as loaded:
        assert loaded.others is not None
        os.kill(rank_of(loaded), signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while not loaded.others.failure:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "rank 1 is gone" in loaded.others.failure
        began = time.monotonic()
        with pytest.raises(RankLost):
            run(loaded, [1, 2, 3], 0, [0])
        with pytest.raises(RankLost, match="an earlier step failed"):  # the ranks may have written different things
            run(loaded, [1, 2, 3], 0, [0])
        assert time.monotonic() - began < 5.0


@pytest.mark.slow
def test_a_replay_without_the_other_rank_is_the_last(folder: Path) -> None:
    chunk = SequenceChunk((1,), 3, [0])
    with recording_worker(folder, 2, num_blocks=4, max_num_seqs=1) as loaded:
        runner = loaded.runner
        assert isinstance(runner, RankedGraphRunner) and runner.replays([chunk]) and loaded.others is not None
        runner.forward([chunk])
        assert not loaded.others.failure
        os.kill(rank_of(loaded), signal.SIGKILL)
        with pytest.raises(RankLost):
            for _ in range(2):  # the message may still be taken
                runner.forward([chunk])
        with pytest.raises(RankLost, match="an earlier step failed"):
            runner.forward([chunk])
        assert loaded.others.failure


@pytest.mark.slow
def test_a_frozen_rank_ends_the_worker_at_the_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named: it may be one of many."""
    monkeypatch.setattr(group, "COLLECTIVE_S", 10.0)
    with worker(folder, 2) as loaded:
        os.kill(rank_of(loaded), signal.SIGSTOP)
        time.sleep(2 * HEARTBEAT_S)
        assert loaded.others is not None and not loaded.others.failure  # reads what it gave before
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"a collective failed.*; rank 1 has sent no heartbeat for [5-9] s"):
            run(loaded, [1, 2, 3], 0, [0])
        assert 5.0 < time.monotonic() - began < 60.0


@pytest.mark.slow
def test_a_rank_that_is_frozen_while_nothing_runs_ends_the_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a collective that waits for it keeps the worker no longer from its end."""
    monkeypatch.setattr(processes, "SILENT_S", 6.0)
    with worker(folder, 2) as loaded:
        others = loaded.others
        assert others is not None
        until = time.monotonic() + 8.0
        while time.monotonic() < until:  # a rank that lives is silent for a second at a time
            assert not others.failure
            time.sleep(0.05)
        os.kill(rank_of(loaded), signal.SIGSTOP)
        failed = list[str]()
        step = threading.Thread(target=lambda: failed.append(str(error_of(lambda: run(loaded, [1, 2, 3], 0, [0])))))
        step.start()
        until = time.monotonic() + 30.0
        while not others.failure:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert others.failure == "rank 1 has sent no heartbeat for 6 s: its process is stopped or the host overloaded"
        began = time.monotonic()
    step.join(30.0)
    assert time.monotonic() - began < 30.0 and "a collective failed" in failed[0]


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except RankLost as error:
        return error
    return None


@pytest.mark.slow
def test_an_error_of_a_step_is_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(folder, 2) as loaded:
        with pytest.raises(BlockError):  # before anything was sent: nothing is lost
            run(loaded, [1, 2, 3], 0, [999])
        assert run(loaded, [1, 2, 3], 0, [0]) >= 0
        monkeypatch.setattr(loaded.runner.model, "forward", broken)
        with pytest.raises(RankLost, match="a step failed on rank 0: out of memory"):
            run(loaded, [1, 2, 3], 0, [0])
        assert loaded.others is not None
        assert "out of memory" in loaded.others.failure


def broken(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.slow
def test_what_a_rank_cannot_load_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*arguments: Any) -> list[RankPlan]:
        return [replace(plan, kv_dtype="float64") for plan in plans(*arguments)]

    monkeypatch.setattr(loading, "plans", damaged)
    with pytest.raises(ModelError, match="rank 1: unsupported dtype 'float64'"), worker(folder, 2):
        pytest.fail("it has started")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"task": "embed"}, ModelError, "is served to embed, which only prefill workers do"),
        ({"kv_memory_gib": 1e-6}, ConfigError, "kv_memory_gib=1e-06: must be at least"),
    ],
)
def test_what_ranks_do_not_do_is_refused(
    folder: Path, settings: dict[str, object], kind: type[Exception], message: str
) -> None:
    config = DecodeWorkerConfig(model=str(folder), dtype="float32", tensor_parallel_size=2, **settings)
    with pytest.raises(kind, match=re.escape(message)):
        load_ranked(resolve_model(str(folder)), config)


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anonymous memory of the other rank, beside that of a tiny model: half of 96 MiB of weights."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MEBI))  # freed buffers go back to the system at once
    folder = make_wide_model(tmp_path / "wide")
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert total > 90 * MEBI
    with worker(make_tiny_model(tmp_path / "tiny"), 2, num_blocks=4, kernel_check=False) as small:
        without = anonymous_bytes(rank_of(small))
    with worker(folder, 2, num_blocks=4, kernel_check=False) as loaded:
        taken = anonymous_bytes(rank_of(loaded)) - without
    assert 0.4 * total < taken < 0.75 * total, f"{taken / MEBI:.0f} of {total / MEBI:.0f} MiB"


def make_wide_model(folder: Path) -> Path:
    """A tiny model of one layer with an MLP of 131,072."""
    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": WIDE, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(load_file(folder / "model.safetensors"))
    for name in list(weights):
        if "layers." in name and "layers.0." not in name:
            del weights[name]
        elif "mlp" in name:
            weights[name] = torch.randn([WIDE if size == FFN else size for size in weights[name].shape]) * 0.01
    save_file(weights, folder / "model.safetensors")
    return folder


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs: mapped weights files do not count, copies of their tensors do."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return kib * 1024
