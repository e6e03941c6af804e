"""Records a piece of GPU work once and replays it with one launch: the only place that speaks CUDA's graph API.

Launching the few hundred kernels of a decode step one by one takes longer than small batches compute.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

WARMUPS = 2
"""Runs before a recording: kernels compile, libraries allocate their workspaces, plans build their work lists."""


class Recorder(Protocol):
    """Turns work into something that can be replayed."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Replaying does what `run` did, on the same memory, with what that memory holds then.

        `run` is called a few times meanwhile; it must not look at values on the host.
        """


class GraphRecorder:
    """CUDA graphs that share one memory pool, so `record` the largest first: the others then fit into its memory.

    Replays must follow each other on one stream. A tensor made inside of `run` is nobody's once another graph runs:
    results must be copied out to memory from outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                for _ in range(WARMUPS):
                    run()
            outside.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
            # `outside` again: a recording that fails leaves its own stream the current one.
            with nothing_collected(), torch.cuda.stream(outside), recording:
                run()
        return graph.replay  # the bound method keeps the graph alive


class PlainRecorder:
    """Replays by running again: for devices without graphs, and for tests of what is recorded."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is looked for: to free somebody's graph or pinned memory spoils the recording that is under way."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
