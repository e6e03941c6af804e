"""The recording of a step as a CUDA graph."""

from __future__ import annotations

import gc

import pytest
import torch

from common.engine.run.recorded_steps import GraphRecorder, collection_paused


def test_no_garbage_is_collected_while_a_graph_is_recorded() -> None:
    with pytest.raises(RuntimeError, match="mid-way"), collection_paused():
        assert not gc.isenabled()
        raise RuntimeError("mid-way")
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_graph_reads_what_its_memory_holds_now() -> None:
    memory, out = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def double() -> None:
        out.copy_(memory * 2)

    replay = GraphRecorder(torch.device("cuda")).record(double)
    memory.fill_(3.0)
    replay()
    assert out.tolist() == [6.0] * 4
