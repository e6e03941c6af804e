from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from router.siblings.part import DIVIDED, AgreedFile, RouterPart


def test_processes_take_together_what_one_would() -> None:
    config = RouterConfig(
        max_inflight=10, max_connections=100, max_background=1, batch_concurrency=7, router_processes=4
    )
    share = RouterPart(1, 4, Path("/run")).share_of(config)
    assert [getattr(share, name) for name in DIVIDED] == [3, 25, 1, 2]
    assert share.queue_timeout_s == config.queue_timeout_s


def test_the_others_have_sockets_of_their_own() -> None:
    part = RouterPart(1, 3, Path("/run"))
    assert part.others == (0, 2) and len({part.socket_of(index) for index in range(3)}) == 3


@pytest.mark.parametrize("number", [0, 65])
def test_the_number_is_bounded(number: int) -> None:
    with pytest.raises(ConfigError, match="router_processes"):
        RouterConfig(router_processes=number)


def test_what_one_process_agreed_to_is_what_another_reads(tmp_path: Path) -> None:
    first, second = (AgreedFile(RouterPart(index, 2, tmp_path), "models") for index in range(2))
    assert first.read() is None
    first.agree(b"one")
    assert second.read() == b"one"
    second.agree(b"two")
    assert first.read() == AgreedFile(RouterPart(0, 2, tmp_path), "models").read() == b"two"
    assert {file.name for file in tmp_path.iterdir()} == {"agreed-models"}
    assert (tmp_path / "agreed-models").stat().st_mode & 0o777 == 0o600
