"""Records a piece of GPU work once and replays it with one launch. No other file uses CUDA's graph API.

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


class StepRecorder(Protocol):
    """Records work that can be replayed."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that replays `run` on the same memory, with the values that it then holds.

        Calls `run` a few times; it must not read values on the host.
        """


class GraphRecorder:
    """CUDA graphs that share one memory pool, so `record` the largest first: the others then fit into its memory.

    Replays must follow each other on one stream. Another graph overwrites the tensors that `run` made, so `run` must
    copy its results to memory from outside.
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
            # Of this thread's calls alone: NCCL's own ask CUDA about earlier sums meanwhile (pytorch 104487, 110665).
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            # `outside` again: a recording that fails leaves its own stream the current one.
            with collection_paused(), torch.cuda.stream(outside), recording:
                run()
        return graph.replay  # the bound method keeps the graph alive


class PlainRecorder:
    """Replays by running again: for devices without graphs, and for tests of what is recorded."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def recorder_for(device: torch.device) -> StepRecorder:
    """What records the steps of this device."""
    return GraphRecorder(device) if device.type == "cuda" else PlainRecorder()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection: freeing a graph or pinned memory would spoil a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
