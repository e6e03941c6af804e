"""Which transports a worker can be told to use."""

from __future__ import annotations

from dataclasses import fields

import pytest

from common.config import DecodeWorkerConfig
from common.engine.transfer.transports.registry import TRANSPORTS, new_transport
from common.engine.transfer.transports.shm import SharedMemoryTransport


def test_every_value_of_the_setting_has_a_transport() -> None:
    (setting,) = [field for field in fields(DecodeWorkerConfig) if field.name == "kv_transport"]
    assert tuple(setting.metadata["diptych"].choices) == tuple(TRANSPORTS)


@pytest.mark.parametrize(("value", "is_required"), [("auto", False), ("shm", True)])
def test_only_shm_refuses_workers_that_cannot_share(value: str, is_required: bool) -> None:
    transport = new_transport(value, "d")
    assert isinstance(transport, SharedMemoryTransport) and transport.is_required == is_required
