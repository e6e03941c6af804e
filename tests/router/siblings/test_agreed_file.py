from __future__ import annotations

from pathlib import Path

from router.siblings.part import AgreedFile, RouterPart


def test_what_one_process_agreed_to_is_what_another_reads(tmp_path: Path) -> None:
    first, second = (AgreedFile(RouterPart(index, 2, tmp_path), "models") for index in range(2))
    assert first.read() is None
    first.agree(b"one")
    assert second.read() == b"one"
    second.agree(b"two")
    assert first.read() == AgreedFile(RouterPart(0, 2, tmp_path), "models").read() == b"two"
    assert {file.name for file in tmp_path.iterdir()} == {"agreed-models"}
    assert (tmp_path / "agreed-models").stat().st_mode & 0o777 == 0o600
