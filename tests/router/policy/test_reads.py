"""Prompts that a worker could read from its disk."""

import pytest

from common.latency.link_model import LinkModel, Links
from router.policy.forecast import RequestShape, on_prefill, read_from_disk

from .test_routing import REMOTE, reported

DISK = LinkModel(latency_s=1e-3, byte_s=1e-9, block_bytes=10**6, num_transfers=9)


def test_a_prompt_goes_where_it_can_be_read_unless_it_is_in_memory_elsewhere():
    registry = reported(p0={"links": Links(disk=DISK)}, p1={})
    read = read_from_disk(registry.workers["p0"], 0, 480)
    assert read == (480, pytest.approx(1e-3 + 30e-3))
    assert read_from_disk(registry.workers["p1"], 0, 480) is None, "it has no disk"
    shape = RequestShape(1000, 100, {}, restored={"p0": read})
    on_disk, computed = (on_prefill(registry.workers[name], shape, 0.0) for name in ("p0", "p1"))
    assert on_disk.prompt_s == pytest.approx(computed.prompt_s * 0.52 + read[1], rel=0.05)
    workers = registry.ready("prefill"), registry.ready("decode")
    assert REMOTE.choose(*workers, shape, 0.0).prefill.address == "p0"
    in_memory = RequestShape(1000, 100, {"p1": 480}, restored={"p0": read})
    assert REMOTE.choose(*workers, in_memory, 0.0).prefill.address == "p1"


def test_what_is_read_more_slowly_than_computed_is_no_reason():
    slow = LinkModel(byte_s=1e-6, block_bytes=10**6, num_transfers=9)
    registry = reported(p0={"links": Links(disk=slow)})
    assert read_from_disk(registry.workers["p0"], 0, 480) is None
